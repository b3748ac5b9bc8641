"""Validation of a call against its operator's schema, with limits on the memory that it can use."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.graph.encoding import StageDevice
from penstock.graph.operators import listed_operators
from penstock.graph.ops import GETITEM, Op, resolve_operator
from penstock.values import Number

FORGED = "the program file is damaged or forged; split the model again"
_LARGEST_ELEMENTS = 2**36
_OPEN_END = 2**63 - 1  # a slice's end for "to the end"
# schema types for which a program may have constants
_CONSTANTS: Mapping[str, type] = {
    "ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format, "Device": StageDevice,
}  # fmt: skip
# integer arguments that determine the size of a result, which is at most their product
_AMOUNTS = {
    "size", "shape", "output_size", "repeats", "pad", "padding", "steps", "n", "m", "row", "col",
    "num_classes", "minlength", "bins", "window_length",
}  # fmt: skip


def marks_of_operators() -> list[str]:
    """Return a hash of each listed operator's schema in this PyTorch, ordered by name; empty if it lacks the operator.

    If two versions have equal hashes, the operator takes the same arguments in both.
    """
    return [_mark(name) for name in sorted(listed_operators())]


def unlike_operators(marks: Sequence[str], others: Sequence[str]) -> frozenset[str]:
    """Return the listed operators that differ between two versions, or that one of them lacks."""
    return frozenset(
        name for name, mark, other in zip(sorted(listed_operators()), marks, others, strict=True) if mark != other
    )


def _mark(name: str) -> str:
    try:
        return hashlib.blake2b(str(resolve_operator(name)._schema).encode(), digest_size=4).hexdigest()
    except AttributeError:
        return ""


def check_call(op: Op) -> None:
    """Reject arguments that the operator does not have, and those that are missing, repeated or too large.

    Raises `ProgramError`.
    """
    if op.target == GETITEM:
        if len(op.arguments) != 2 or op.keywords or not isinstance(op.arguments[1], int):
            raise ProgramError(f"{op.name}: getitem takes a value and an index; {FORGED}")
        return
    try:
        schema = resolve_operator(op.target)._schema
    except AttributeError:
        raise ProgramError(
            f"operator {op.target!r} not found in this PyTorch; capture and run with the same version"
        ) from None
    names = [parameter.name for parameter in schema.arguments]
    positional = [parameter.name for parameter in schema.arguments if not parameter.kwarg_only]
    given = set(names[: len(op.arguments)])
    if len(op.arguments) > len(positional) or not set(op.keywords) <= set(names) - given:
        raise ProgramError(f"{op.name}: {op.target} does not take these arguments; {FORGED}")
    for parameter in schema.arguments:
        if parameter.name not in given and parameter.name not in op.keywords and not parameter.has_default_value():
            raise ProgramError(f"{op.name}: {op.target} lacks the argument {parameter.name!r}; {FORGED}")
    _check_constants(op, schema)
    check_amounts(op, op.arguments, op.keywords)


def _check_constants(op: Op, schema: torch.FunctionSchema) -> None:
    """Reject numbers and text for dtypes, layouts and devices: torch accepts any integer and then crashes."""
    given = dict(zip((parameter.name for parameter in schema.arguments), op.arguments, strict=False)) | dict(
        op.keywords
    )
    for parameter in schema.arguments:
        value = given.get(parameter.name)
        kinds = [kind for word, kind in _CONSTANTS.items() if word in str(parameter.real_type)]
        if value is not None and kinds and not isinstance(value, kinds[0]):
            raise ProgramError(
                f"{op.name}: {parameter.name} of {op.target} must be a {kinds[0].__name__}; got {repr(value)[:80]}; "
                f"{FORGED}"
            )


def check_amounts(op: Op, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Reject numbers that would create an excessively large tensor; unknown sizes are accepted.

    Raises `ProgramError`.
    """
    if op.target == GETITEM:
        return
    parameters = resolve_operator(op.target)._schema.arguments
    given = {**dict(zip((p.name for p in parameters), arguments, strict=False)), **keywords}
    made: list[Number] = []
    for parameter in parameters:
        numbers = _numbers(given.get(parameter.name))
        if "int" not in str(parameter.type).lower():
            continue
        if any(abs(n) > _LARGEST_ELEMENTS and n != _OPEN_END for n in numbers):
            raise ProgramError(_too_much(op.name))
        if parameter.name in _AMOUNTS or op.target.startswith("aten.tile."):
            made += numbers
    check_product(op.name, made)
    if op.target.startswith(("aten.arange.", "aten.range.")):
        first, last, step = (_numbers(given.get(key)) for key in ("start", "end", "step"))
        if last and not abs(last[0] - sum(first)) <= _LARGEST_ELEMENTS * min(1, abs(step[0]) if step else 1):
            raise ProgramError(_too_much(op.name))


def check_product(name: str, numbers: Sequence[Number]) -> None:
    """Reject a shape with too many elements; a dimension of 0 counts as 1."""
    product: Number = 1
    for number in numbers:
        product *= max(1, abs(number))
        if not product <= _LARGEST_ELEMENTS:
            raise ProgramError(_too_much(name))


def _numbers(argument: Any) -> list[Number]:
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    return [item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]


def _too_much(name: str) -> str:
    return f"{name} exceeds the limit of {_LARGEST_ELEMENTS} elements; {FORGED}"
