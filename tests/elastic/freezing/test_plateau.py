"""Layers that stand still, by literal epochs and by properties."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.elastic.epochs import most_frozen, next_frozen
from penstock.elastic.freezing import Plateau
from penstock.errors import UsageError
from tests.elastic.freezing.records import epochs, follow, trainings

STILL = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_nothing_freezes_before_enough_epochs() -> None:
    assert follow(Plateau(patience=3), [STILL] * 4, 6) == [0, 0, 0, 0, 2]


@pytest.mark.parametrize(
    ("rows", "frozen"),
    [
        ([[1.0, 1.0, 9.0, 1.0], [1.04, 1.0, 5.0, 1.0], [1.0, 1.0, 3.0, 1.0]], 2),  # up to the one that changes
        ([[9.0, 1.0, 1.0, 1.0], [5.0, 1.0, 1.0, 1.0], [3.0, 1.0, 1.0, 1.0]], 0),
        ([[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0]], 1),  # in one of the two epochs
        ([[1.0, 1.0, 1.0, 1.0], [1.0, float("nan"), 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]], 1),
        ([[9.0, 9.0, 9.0, 9.0], [1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]], 3),
    ],
)
def test_leading_layers_without_change_freeze(rows: list[list[float]], frozen: int) -> None:
    assert next_frozen(Plateau(alpha=0.9), epochs(*rows), 4) == frozen


def test_one_epoch_freezes_no_more_than_its_share() -> None:
    assert follow(Plateau(patience=1), [STILL] * 5, 6) == [0, 0, 2, 4, 5, 6]


def test_layer_that_was_frozen_between_epochs_is_compared_again() -> None:
    taken_back = epochs([0.0, 1.0], [0.0, 1.0], [0.0, 1.0], frozen=[1, 1, 0])
    assert next_frozen(Plateau(patience=2), taken_back, 2) == 0


@given(trainings(), st.integers(1, 3), st.floats(0.01, 0.99))
def test_plateau_never_unfreezes_nor_exceeds_the_bound(
    training: tuple[list[list[float]], int], patience: int, threshold: float
) -> None:
    rows, num_layers = training
    policy = Plateau(patience=patience, threshold=threshold)
    frozen = follow(policy, rows, num_layers)
    assert frozen[: patience + 1] == [0] * len(frozen[: patience + 1])
    assert all(a <= b <= most_frozen(a, 1 / 3, num_layers) <= num_layers for a, b in pairwise(frozen))
    assert frozen == follow(policy, rows, num_layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience must be at least 1 epoch; got 0; use 2"),
        ({"threshold": 0.0},
         "threshold, a relative change of gradient norms, must be between 0 and 1; got 0.0; use 0.05"),
        ({"threshold": float("nan")},
         "threshold, a relative change of gradient norms, must be between 0 and 1; got nan; use 0.05"),
        ({"alpha": 2.0},
         "alpha, the share of trained layers that one epoch may freeze, must be between 0 and 1; got 2.0; use 1/3"),
    ],
)  # fmt: skip
def test_arguments_out_of_range(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Plateau(**arguments)  # type: ignore[arg-type]
    assert str(error.value) == message
