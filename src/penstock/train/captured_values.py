"""Values that a loss function takes from the script around it, compared between the ranks that run the script."""

import dis
import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.tensors import digest
from penstock.train.stand_in import StandIn

_LARGEST_BYTES, _LONGEST = 2**16, 64  # larger tensors and longer sequences are not compared


def captured_values(*functions: Any) -> dict[str, str]:
    """Return the floats and small tensors that functions read from closures, globals and defaults, as text.

    Names that a function itself assigns are left out: they differ wherever it has run more often.

    >>> weight = 0.25
    >>> captured_values(lambda output, labels: weight * output)["weight"]
    '0.25'
    """
    return {name: text for each in functions for name, value in _values(each) if (text := _text(value)) is not None}


def _values(function: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(function, (functools.partial, MethodType)):
        if isinstance(function, functools.partial):
            yield from ((f"argument {place}", value) for place, value in enumerate(function.args))
            yield from function.keywords.items()
            function = function.func
        else:
            function = function.__func__
    if not isinstance(function, FunctionType):
        return
    code = function.__code__
    names, assigned = _names(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield from [] if name in assigned else [(name, cell.cell_contents)]
        except ValueError:  # not assigned yet
            continue
    for name in names - assigned:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


@functools.cache
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals that a function reads, and the outer names that it assigns."""
    found = list(dis.get_instructions(code))
    read = {each.argval for each in found if each.opname == "LOAD_GLOBAL"}
    assigned = {each.argval for each in found if each.opname in {"STORE_DEREF", "STORE_GLOBAL"}}
    return frozenset(read), frozenset(assigned)


def _text(value: Any) -> str | None:
    """Return a text of what scripts draw at random: a float, a tensor, a tuple of these; None for anything else.

    What the function may have changed itself, a list or a tensor that was written to, is not compared.
    """
    if isinstance(value, StandIn):
        return None
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
    if isinstance(value, Tensor):
        small = value.layout == torch.strided and not value.is_nested and value.nbytes <= _LARGEST_BYTES
        small = small and not value.is_inference() and value._version == 0
        return f"a tensor {digest(value.detach().cpu())}" if small else None
    if isinstance(value, tuple) and len(value) <= _LONGEST:
        parts = [_text(each) for each in value]
        return None if None in parts or not parts else f"[{', '.join(map(str, parts))}]"
    return None


def first_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first name whose value differs, if any."""
    return next((name for name in sorted(mine.keys() & theirs.keys()) if mine[name] != theirs[name]), None)
