"""Simplifications that older versions of PyTorch lack."""

import sympy
from torch.utils._sympy.functions import Max, Min, MinMaxBase

from penstock.graph.exporting import ordered_multiples


def test_the_smaller_of_two_multiples_is_known_within_the_context() -> None:
    size, any_number = sympy.Symbol("size", positive=True, integer=True), sympy.Symbol("any_number", integer=True)
    before = vars(MinMaxBase)["_collapse_arguments"].__func__
    with ordered_multiples():
        assert (Min(12 * size, 24 * size), Max(12 * size, 24 * size)) == (12 * size, 24 * size)
        assert Min(12 * any_number, 24 * any_number) not in {12 * any_number, 24 * any_number}
        assert Min(12 * size, any_number).args
    assert vars(MinMaxBase)["_collapse_arguments"].__func__ is before
