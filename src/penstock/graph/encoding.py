"""JSON encoding of operations' arguments, limited to a list of types."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.graph.ops import Argument, Ref
from penstock.values import Size, check_expression

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
            "dtype": DTYPES, "memory_format": _FORMATS, "layout": _LAYOUTS,
            "float": _FLOATS, "device": {"stage": STAGE_DEVICE},
        }  # fmt: skip
        if kind in tables and isinstance(content, str) and content in tables[kind]:
            return tables[kind][content]
    raise ProgramError(f"{repr(item)[:80]} is not an argument; the program file is damaged or forged")


def _listed(expression: Any) -> Any:
    return [_listed(item) for item in expression] if isinstance(expression, tuple) else expression
