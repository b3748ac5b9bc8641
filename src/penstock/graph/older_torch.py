"""Fixes for captures with older versions of PyTorch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy
from torch.utils._sympy import functions


@contextlib.contextmanager
def ordered_multiples() -> Iterator[None]:
    """Within the context, PyTorch 2.10 and 2.11 simplify min(12x, 24x) to 12x, as newer versions do.

    Otherwise torch.export guards on this where it compares strides, and refuses other lengths for a model whose heads
    share keys, such as Llama. Hold `EXPORTING`.
    """
    base: Any = functions.MinMaxBase
    if hasattr(base, "_collapse_known_multiplicative_terms"):
        yield
        return
    inherited = base._collapse_arguments.__func__

    def collapse(cls: Any, /, args: Any, **assumptions: Any) -> Any:
        found = inherited(cls, args, **assumptions)
        if len(found) == 2:
            (one, factor), (other, same) = (each.as_coeff_Mul() for each in found)
            if factor == same and factor.is_nonnegative and one != other:
                return frozenset([sympy.Mul((min if cls is functions.Min else max)(one, other), factor)])
        return found

    base._collapse_arguments = classmethod(collapse)
    try:
        yield
    finally:
        base._collapse_arguments = classmethod(inherited)
