"""States and operations, the elements of captured graphs and stage programs, and the JSON encoding of their arguments.

The encoding is limited to a list of types.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

import torch

from penstock.errors import ProgramError
from penstock.packing import packed_shape
from penstock.values import Size, Value, check_expression

GETITEM = "operator.getitem"
CALLBACK = "penstock.callback.default"  # see `callbacks.py`; only in training
BATCH_NORM = "aten.batch_norm.default"
# None, bool, int, float, str, Ref, Size, torch.dtype/device/layout/memory_format, or lists of these
Argument: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value by name."""

    name: str


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a stage holds between microbatches.

    A cache is initially zero, belongs to a single stage, and is never sent. A tensor with a `packing` is sent as the
    bytes of its file (see `packing.py`); `value` has the shape and dtype of its numbers.
    """

    value: Value
    source: str
    kind: Literal["parameter", "buffer", "constant", "cache"]
    requires_grad: bool = False  # for parameters; torch.matmul then uses another kernel, with other last bits
    packing: str = ""

    def num_bytes(self, *, packed: bool = False) -> int:
        """Return the bytes of the tensor; if `packed`, of its file if it has a packing."""
        if packed and self.packing:
            return prod(packed_shape(self.packing, self.value.evaluate({})))
        return self.value.num_bytes({})


@dataclass(frozen=True, slots=True)
class Op:
    """A call of an operator; its result has the operation's name.

    With `no_grad` the operation runs without gradients in training.
    """

    name: str
    target: str
    arguments: tuple[Argument, ...]
    keywords: Mapping[str, Argument]
    no_grad: bool = False

    @property
    def packet(self) -> str:
        """Name of the operator without namespace and overload: `addmm` of `aten.addmm.default`."""
        return self.target.split(".")[1]

    def uses(self) -> Iterator[str]:
        """Yield the name of every value that this operation reads or writes."""
        yield from references(self.arguments)
        yield from references(tuple(self.keywords.values()))


def references(argument: Argument) -> Iterator[str]:
    """Return the names of the values inside an argument, however nested."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from references(item)


def substitute(argument: Argument, renamed: Mapping[str, Argument]) -> Argument:
    """Replace references by their entries in `renamed`, at any depth."""
    if isinstance(argument, Ref):
        return renamed.get(argument.name, argument)
    if isinstance(argument, (list, tuple)):
        return [substitute(item, renamed) for item in argument]
    return argument


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of an operator on storage: the arguments with which its result may share memory, and those it writes."""

    shares: tuple[str, ...]
    writes: tuple[str, ...]


def resolve_operator(target: str) -> Any:
    """Return the operator with a name such as `aten.linear.default`; raises `AttributeError` if not found."""
    namespace, packet, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


# their schema declares a write, but they change only autograd's record of a tensor
_WRITES_NOTHING = {"aten.detach_.default"}


def effect(op: Op) -> Effect:
    """Determine from the operator's schema which values a call shares storage with, and which it writes."""
    if op.target == GETITEM:
        return Effect(shares=tuple(references(op.arguments[0])), writes=())
    operator = resolve_operator(op.target)
    schema = operator._schema
    if op.target in _WRITES_NOTHING or op.target == CALLBACK:
        return Effect(shares=tuple(op.uses()), writes=())
    if torch.Tag.maybe_aliasing_or_mutating in operator.tags:
        return _undeclared_effect(op)
    returned = {tag for result in schema.returns if result.alias_info for tag in result.alias_info.before_set}
    shares: list[str] = []
    writes: list[str] = []
    for position, parameter in enumerate(schema.arguments):
        alias = parameter.alias_info
        if alias is None:
            continue
        given = op.arguments[position] if position < len(op.arguments) else op.keywords.get(parameter.name)
        names = list(references(given))
        if alias.is_write:
            writes += names
        # `Tensor(a -> *)`, as in split, means that the results are views of the argument
        if alias.is_write or "*" in alias.after_set or returned & set(alias.before_set):
            shares += names
    return Effect(shares=tuple(shares), writes=tuple(writes))


def returned_argument(op: Op) -> Argument | None:
    """Return the argument that an operator writes to and returns, as for `add_` and `out=`; None if there is none."""
    if op.target == GETITEM:
        return None
    schema = resolve_operator(op.target)._schema
    first = schema.returns[0].alias_info if schema.returns else None
    if first is None or not first.is_write:
        return None
    for position, parameter in enumerate(schema.arguments):
        if parameter.alias_info is not None and set(parameter.alias_info.before_set) == set(first.before_set):
            return op.arguments[position] if position < len(op.arguments) else op.keywords.get(parameter.name)
    return None


def _undeclared_effect(op: Op) -> Effect:
    """Return the effect of an operator whose schema does not declare it: a possible view counts as a view."""
    if op.target == BATCH_NORM:  # returns a new tensor; in training it also updates the running statistics
        *_, mean, variance, training = op.arguments[:6]
        return Effect(shares=(), writes=tuple(references([mean, variance])) if training else ())
    return Effect(shares=tuple(op.uses()), writes=())


def is_factory(op: Op) -> bool:
    """Return True if an operation creates a tensor without tensor inputs and has a `device` argument."""
    if op.target == GETITEM:
        return False
    arguments = resolve_operator(op.target)._schema.arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def is_random(op: Op) -> bool:
    """Return True if an operation draws random numbers."""
    return op.target != GETITEM and torch.Tag.nondeterministic_seeded in resolve_operator(op.target).tags


DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
_FORMATS: Mapping[str, torch.memory_format] = {
    str(f).removeprefix("torch."): f
    for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_LAYOUTS: Mapping[str, torch.layout] = {"strided": torch.strided}
_FLOATS: Mapping[str, float] = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class StageDevice:
    """Placeholder for the device on which a stage runs, independent of the device of the capture."""


STAGE_DEVICE = StageDevice()


def settled(argument: Argument, sizes: Mapping[str, int], device: torch.device, value_of: Callable[[str], Any]) -> Any:
    """Return an operation's argument with sizes as numbers, the stage's device, and values looked up by `value_of`.

    >>> settled([Ref("x"), Size(("*", 2, "batch"))], {"batch": 3}, torch.device("cpu"), str.upper)
    ['X', 6]
    """
    if isinstance(argument, Ref):
        return value_of(argument.name)
    if isinstance(argument, Size):
        return argument.evaluate(sizes)
    if isinstance(argument, StageDevice):
        return device
    if isinstance(argument, (list, tuple)):
        return [settled(item, sizes, device, value_of) for item in argument]
    return argument


def encode(argument: Argument) -> Any:
    """Convert an operation's argument to JSON values; raises `ProgramError` for other types."""
    if argument is None or isinstance(argument, (bool, str)):
        return argument
    if isinstance(argument, int):
        return int(argument)
    if isinstance(argument, float):
        return argument if math.isfinite(argument) else {"float": str(argument)}
    if isinstance(argument, (list, tuple)):
        return [encode(item) for item in argument]
    if isinstance(argument, Ref):
        return {"value": argument.name}
    if isinstance(argument, Size):
        return {"size": _listed(argument.expression)}
    if isinstance(argument, StageDevice):
        return {"device": "stage"}
    for kind, known in (("dtype", DTYPES), ("memory_format", _FORMATS), ("layout", _LAYOUTS)):
        for name, constant in known.items():
            if constant is argument:
                return {kind: name}
    raise ProgramError(f"a stage program cannot hold an argument of type {type(argument).__name__}: {argument!r}")


def decode(item: Any, symbols: frozenset[str], depth: int = 0) -> Argument:
    """Decode an argument from JSON; raises `ProgramError` for anything unknown."""
    if item is None or isinstance(item, (bool, str, int, float)):
        return item
    if isinstance(item, list):
        if depth > 4:
            raise ProgramError("an argument is nested too deeply; the program file is damaged or forged")
        return [decode(inner, symbols, depth + 1) for inner in item]
    if isinstance(item, dict) and len(item) == 1:
        kind, content = next(iter(item.items()))
        if kind == "value" and isinstance(content, str):
            return Ref(content)
        if kind == "size":
            return Size(check_expression(content, symbols))
        tables: dict[str, Mapping[str, Any]] = {
            "dtype": DTYPES,
            "memory_format": _FORMATS,
            "layout": _LAYOUTS,
            "float": _FLOATS,
            "device": {"stage": STAGE_DEVICE},
        }
        if kind in tables and isinstance(content, str) and content in tables[kind]:
            return tables[kind][content]
    raise ProgramError(f"{repr(item)[:80]} is not an argument; the program file is damaged or forged")


def _listed(expression: Any) -> Any:
    return [_listed(item) for item in expression] if isinstance(expression, tuple) else expression
