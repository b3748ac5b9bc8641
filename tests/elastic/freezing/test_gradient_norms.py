"""PipeTransformer's rule by literal epochs and by its properties."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given

from penstock.elastic.epochs import most_frozen, next_frozen
from penstock.elastic.freezing import GradientNorms
from tests.elastic.freezing.records import alphas, epochs, follow, trainings

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("norms", "frozen"),
    [
        ([1.0, 5.0, 5.0, 5.0, 5.0, 5.0], 1),  # the smallest norm itself is frozen
        ([5.0, 1.0, 5.0, 5.0, 5.0, 5.0], 2),
        ([5.0, 5.0, 5.0, 5.0, 5.0, 1.0], 2),  # a third of six
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 1),  # the first of equals
    ],
)
def test_first_epoch_compares_norms_of_layers(norms: list[float], frozen: int) -> None:
    assert next_frozen(GradientNorms(), epochs(norms), 6) == frozen


@pytest.mark.parametrize(
    ("before", "now", "frozen"),
    [
        ([4.0, 4.0, 4.0, 4.0, 4.0, 4.0], [2.0, 3.9, 2.0, 2.0, 2.0, 2.0], 2),
        ([4.0, 4.0, 4.0, 4.0, 4.0, 4.0], [4.1, 3.0, 2.0, 2.0, 2.0, 2.0], 1),
        ([9.0, 0.1, 4.0, 4.0, 4.0, 4.0], [8.9, 0.2, 2.0, 2.0, 2.0, 2.0], 1),  # relative, and not the norm itself
        ([0.0, 4.0, 4.0, 4.0, 4.0, 4.0], [1.0, 3.9, 2.0, 2.0, 2.0, 2.0], 2),  # from zero is no small change
    ],
)
def test_later_epochs_compare_changes_of_norms(before: list[float], now: list[float], frozen: int) -> None:
    assert next_frozen(GradientNorms(), epochs(before, now), 6) == frozen


def test_frozen_layers_are_not_compared() -> None:
    history = epochs([0.0, 0.0, 3.0, 3.0, 3.0], [0.0, 0.0, 1.0, 2.9, 1.0], frozen=[2, 2])
    assert next_frozen(GradientNorms(alpha=0.9), history, 5) == 4


@pytest.mark.parametrize("strange", [NAN, INF])
def test_norms_that_are_not_finite_freeze_nothing_more(strange: float) -> None:
    assert next_frozen(GradientNorms(), epochs([0.0, 1.0, strange], frozen=[1]), 3) == 1
    assert next_frozen(GradientNorms(), epochs([0.0, strange, 1.0], [0.0, 1.0, 1.0], frozen=[1, 1]), 3) in {1, 2}
    assert next_frozen(GradientNorms(), epochs([strange] * 3, [1.0] * 3), 3) == 0


def test_frozen_model_stays_frozen() -> None:
    assert next_frozen(GradientNorms(), epochs([0.0] * 3, frozen=[3]), 3) == 3


def test_the_last_layer_is_reached() -> None:
    rows = [[float(2**epoch)] * 11 + [0.5 * 1.1**epoch] for epoch in range(6)]
    assert follow(GradientNorms(), rows, 12) == [0, 4, 7, 9, 10, 11, 12]


@given(trainings(), alphas)
def test_gradient_norms_never_unfreeze_nor_exceed_the_bound(
    training: tuple[list[list[float]], int], alpha: float | Fraction
) -> None:
    rows, num_layers = training
    frozen = follow(GradientNorms(alpha), rows, num_layers)
    assert frozen[0] == 0
    assert all(a <= b <= most_frozen(a, alpha, num_layers) <= num_layers for a, b in pairwise(frozen))
    assert frozen == follow(GradientNorms(alpha), rows, num_layers), "the same epochs, the same answers"
