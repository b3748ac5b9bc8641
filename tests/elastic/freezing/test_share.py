"""The share of the trained layers that one epoch may freeze."""

import math
from fractions import Fraction
from itertools import pairwise, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.elastic.epochs import check_share, exact_share, most_frozen
from penstock.errors import UsageError
from tests.elastic.freezing.records import alphas


def test_bound_of_frozen_layers_by_epoch() -> None:
    frozen = [0]
    for _ in range(8):
        frozen.append(most_frozen(frozen[-1], 1 / 3, 12))
    assert frozen == [0, 4, 7, 9, 10, 11, 12, 12, 12]


@given(alphas, st.integers(0, 200))
def test_bound_grows_until_all_layers_are_frozen(alpha: float | Fraction, num_layers: int) -> None:
    frozen = 0
    for _ in repeat(None, num_layers):
        grown = most_frozen(frozen, alpha, num_layers)
        assert frozen <= grown <= num_layers
        assert grown > frozen or frozen == num_layers
        frozen = grown
    assert frozen == num_layers


@pytest.mark.parametrize("denominator", range(2, 101))
def test_floats_are_taken_for_the_fractions_that_they_stand_for(denominator: int) -> None:
    for numerator in range(1, denominator):
        assert exact_share(numerator / denominator) == Fraction(numerator, denominator)


def test_the_smallest_share_is_none_that_rounds_to_nothing() -> None:
    assert exact_share(1e-12) == Fraction(1e-12)
    assert exact_share(math.nextafter(1, 0)) < 1
    assert [b - a for a, b in pairwise([most_frozen(n, 1e-12, 12) for n in range(3)])] == [1, 1]


@pytest.mark.parametrize("alpha", [0, 1, -0.5, 1.5, float("nan"), float("inf"), Fraction(4, 3)])
def test_share_must_be_between_0_and_1(alpha: float) -> None:
    with pytest.raises(UsageError) as error:
        check_share(alpha)
    assert str(error.value) == (
        f"alpha, the share of trained layers that one epoch may freeze, must be between 0 and 1; got {alpha}; use 1/3"
    )
