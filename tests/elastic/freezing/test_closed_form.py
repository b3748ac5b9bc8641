"""The calendar by its table, its bounds, and the recurrence that it solves."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.elastic.epochs import exact_share, most_frozen
from penstock.elastic.freezing import ClosedForm
from tests.elastic.freezing.records import alphas, follow


@pytest.mark.parametrize(
    ("num_layers", "alpha", "frozen"),
    [
        (12, 1 / 3, [0, 4, 7, 9, 10, 11, 11, 12, 12]),
        (12, Fraction(1, 3), [0, 4, 7, 9, 10, 11, 11, 12, 12]),
        (12, 1 - 2 / 3, [0, 4, 7, 9, 10, 11, 11, 12, 12]),
        (12, 1 / 2, [0, 6, 9, 11, 12, 12]),
        (24, 1 / 4, [0, 6, 11, 14, 17, 19, 20]),
        (10, 0.1, [0, 1, 2, 3, 4, 5, 5, 6]),
        (1, 1 / 3, [0, 1, 1]),
        (0, 1 / 3, [0, 0, 0]),
    ],
)
def test_layers_by_epoch(num_layers: int, alpha: float, frozen: list[int]) -> None:
    rows = [[1.0] * num_layers] * (len(frozen) - 1)
    assert follow(ClosedForm(alpha), rows, num_layers) == frozen


@given(alphas, st.integers(0, 100))
def test_closed_form_grows_up_to_all_layers(alpha: float | Fraction, num_layers: int) -> None:
    policy = ClosedForm(alpha)
    frozen = [policy.after(epochs, num_layers) for epochs in range(30)]
    assert frozen[0] == 0
    assert all(0 <= a <= b <= num_layers for a, b in pairwise(frozen))


@given(alphas, st.integers(0, 100))
def test_closed_form_solves_the_recurrence_exactly(alpha: float | Fraction, num_layers: int) -> None:
    share, exact, rounded = exact_share(alpha), Fraction(0), 0
    for epochs in range(12):
        assert exact == num_layers * (1 - (1 - share) ** epochs)
        assert exact <= ClosedForm(alpha).after(epochs, num_layers) < exact + 1
        # rounded up after each epoch it is ahead at times, and never behind
        assert rounded >= ClosedForm(alpha).after(epochs, num_layers)
        exact += share * (num_layers - exact)
        rounded = most_frozen(rounded, alpha, num_layers)
