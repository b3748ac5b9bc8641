from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.plan.schedule.round_robin import round_robin, round_robin_counts


def test_cut_sets_take_turns() -> None:
    assert round_robin([1.0]) == (0,)
    assert round_robin([0.5, 0.5]) == (0, 1)
    assert round_robin([0.5, 0.25, 0.25]) == (0, 1, 2, 0)
    assert round_robin([0.75, 0.25]) == (0, 0, 1, 0)


def test_weights_of_deit_s() -> None:
    order = round_robin([0.12, 0.13, 0.12, 0.63])
    assert len(order) == 100
    assert [order.count(index) for index in range(4)] == [12, 13, 12, 63]


def test_cut_set_rarer_than_the_period_is_dropped() -> None:
    assert round_robin_counts([0.999, 0.001]) == (1, 0)
    assert round_robin([0.999, 0.001]) == (0,)


def test_period_is_as_short_as_possible() -> None:
    assert round_robin_counts([1 / 3, 2 / 3]) == (1, 2)
    assert round_robin_counts([0.4, 0.6], period=3) == (1, 2)


@pytest.mark.parametrize("weights", [[], [0.5, 0.6], [1.5, -0.5]])
def test_weights_must_add_up_to_one(weights: list[float]) -> None:
    with pytest.raises(PlanError, match="weights of cut sets must add up to 1"):
        round_robin(weights)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(8, 100))
def test_every_set_is_always_within_one_turn_of_its_part(parts: list[int], period: int) -> None:
    order = round_robin([part / sum(parts) for part in parts], period=period)
    assert 1 <= len(order) <= period
    for index in set(order):
        part = Fraction(order.count(index), len(order))
        given = 0
        for turn, chosen in enumerate(order, 1):
            given += chosen == index
            assert abs(given - part * turn) < 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_counts_are_near_the_weights(parts: list[int]) -> None:
    weights = [part / sum(parts) for part in parts]
    counts = round_robin_counts(weights)
    for number, weight in zip(counts, weights, strict=True):
        assert abs(number / sum(counts) - weight) <= 0.01
