"""Calls of a program bound to one microbatch size: the registers that each reads, writes and releases."""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import OutOfMemory, RunError
from penstock.graph.ops import Op
from penstock.resources import is_out_of_memory
from penstock.text import first_line

# These return their first argument if its type or sizes are already as requested. Other operators that may return a
# view, such as contiguous, decide by strides, which may differ at each call.
_MAY_KEEP = frozenset(
    {
        "aten.to.dtype",
        "aten.slice.Tensor",
        "aten.expand.default",
        "aten.view.default",
        "aten.reshape.default",
        "aten.alias.default",
        "aten.detach.default",
    }
)


@dataclass(frozen=True, slots=True)
class BoundCall:
    """One bound call: registers to read, the result's register, and registers to release afterwards."""

    name: str
    function: Callable[..., Any]
    arguments: list[Any]
    slots: tuple[tuple[int, int], ...]  # position in `arguments`, register
    lists: tuple[tuple[int, list[Any]], ...]  # position, items of which some are registers
    keywords: dict[str, Any]
    result: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Register:
    """A place of a value in a bound call's arguments."""

    index: int


@dataclass(slots=True)
class Bound:
    """A program for one microbatch size: sizes are numbers, and the prelude has been computed."""

    registers: list[Any]
    steps: list[BoundCall]
    short: list[BoundCall] | None = None  # after the first run: without operations that return their argument


def run_step(step: BoundCall, registers: list[Any]) -> Any:
    """Run a call on the registers and return its result; raises `RunError` naming the operation."""
    arguments = step.arguments.copy()
    for position, register in step.slots:
        arguments[position] = registers[register]
    for position, items in step.lists:
        arguments[position] = [registers[x.index] if isinstance(x, Register) else x for x in items]
    try:
        made = registers[step.result] = step.function(*arguments, **step.keywords)
    # the message for any exception names the operation
    except Exception as error:
        kind = OutOfMemory if is_out_of_memory(error) else RunError
        raise kind(f"operation {step.name} failed: {first_line(error)}") from error
    for register in step.ends:
        registers[register] = None
    return made


def shortened(
    steps: Sequence[BoundCall], kept: Mapping[int, int], first: int, outputs: Sequence[int]
) -> list[BoundCall]:
    """Leave out steps that return their argument, as listed in `kept`; later steps read the argument's register.

    Registers before `first`, and those of `outputs`, are never released.
    """

    def register(index: int) -> int:
        return kept.get(index, index)

    made = []
    for step in steps:
        if step.result in kept:
            continue
        lists = tuple(
            (position, [Register(register(x.index)) if isinstance(x, Register) else x for x in items])
            for position, items in step.lists
        )
        made.append(
            replace(step, slots=tuple((position, register(index)) for position, index in step.slots), lists=lists)
        )
    # a register lives until the last step that reads it under any of its names; the steps are in order
    last = {register(index): number for number, step in enumerate(steps) for index in step.ends}
    left = [number for number, step in enumerate(steps) if step.result not in kept]
    ends: dict[int, list[int]] = {}
    for index, number in last.items():
        if index >= first and index not in outputs:
            ends.setdefault(bisect.bisect_right(left, number) - 1, []).append(index)
    return [replace(step, ends=tuple(ends.get(number, ()))) for number, step in enumerate(made)]


def positional(
    function: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Append keyword arguments that are values to the positional arguments, so that one list has all registers."""
    names = [key for key, item in keywords.items() if isinstance(item, (Register, list))]
    count = len(arguments)
    rest = {key: item for key, item in keywords.items() if key not in names}

    def call(*given: Any, **settled: Any) -> Any:
        return function(*given[:count], **dict(zip(names, given[count:], strict=True)), **settled)

    return call, [*arguments, *(keywords[name] for name in names)], rest


def may_keep(op: Op, step: BoundCall) -> bool:
    """Return True if an operation may return its first argument, which depends only on types and sizes."""
    by_strides = op.keywords.get("memory_format")
    return op.target in _MAY_KEEP and not by_strides and bool(step.slots) and step.slots[0][0] == 0


def is_same(made: Any, given: Any) -> bool:
    """Return True if a result is the argument itself, or a view of all of it.

    Memory is compared without addresses, which tensors without values do not have.
    """
    if not (isinstance(made, Tensor) and isinstance(given, Tensor)):
        return False
    alike = made.dtype == given.dtype and made.shape == given.shape and made.stride() == given.stride()
    shared = torch._C._is_alias_of(made, given)  # type: ignore[attr-defined]
    return bool(alike and shared and made.storage_offset() == given.storage_offset())
