"""The guard stops or takes back where validation gets worse, and is nobody where there is none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.elastic.epochs import next_frozen
from penstock.elastic.freezing import ByHand, ClosedForm, GradientNorms, Guarded, Then
from penstock.errors import UsageError
from tests.elastic.freezing.records import follow, trainings, validated

INNER = ClosedForm()
NAN = float("nan")


@pytest.mark.parametrize(
    ("frozen", "accuracy", "stop", "back"),
    [
        ([0, 4, 7], [0.80, 0.85, 0.83], 7, 4),  # the best was with four
        ([0, 4, 7], [0.80, 0.79, 0.785], 7, 0),  # worse than the best, not than the epoch before
        ([0, 4, 7, 7, 7], [0.80, 0.85, 0.83, 0.90, 0.91], 7, 4),  # and it stays there, whatever comes
        ([0, 4, 7, 4, 4], [0.80, 0.85, 0.83, 0.95, 0.70], 7, 4),
        ([0, 4, 7], [0.80, NAN, 0.80], 4, 0),
        ([0, 4, 7], [0.80, None, 0.70], 7, 0),
    ],
)
def test_dropped_accuracy_stops_freezing(frozen: list[int], accuracy: list[float], stop: int, back: int) -> None:
    history = validated(frozen, accuracy=accuracy)
    assert next_frozen(Guarded(INNER), history, 12) == stop
    assert next_frozen(Guarded(INNER, then="take back"), history, 12) == back


@pytest.mark.parametrize(
    ("frozen", "accuracy"),
    [
        ([0, 4, 7], [0.80, 0.85, 0.84]),  # just as much as is allowed, which is no drop in decimals
        ([0, 4, 7], [0.90, 0.89, 0.89]),
        ([0, 0, 4], [0.80, 0.50, 0.81]),  # what is lost with nothing frozen was not lost to freezing
        ([0, 4, 7], [NAN, 0.50, 0.50]),
        ([0, 4, 7], [None, None, None]),
    ],
)
def test_steady_accuracy_keeps_freezing(frozen: list[int], accuracy: list[float]) -> None:
    history = validated(frozen, accuracy=accuracy)
    for then in ("stop", "take back"):
        assert next_frozen(Guarded(INNER, then=then), history, 12) == INNER.after(3, 12)


@pytest.mark.parametrize(
    ("loss", "stop", "back"),
    [
        ([2.0, 1.0, 1.02], 7, 4),
        ([2.0, 1.0, 1.005], 9, 9),
        ([200.0, 100.0, 100.5], 9, 9),  # relative
        ([-1.0, -2.0, -1.9], 7, 4),
        ([2.0, 1.0, float("inf")], 7, 4),
    ],
)
def test_guard_uses_the_loss_without_accuracy(loss: list[float], stop: int, back: int) -> None:
    history = validated([0, 4, 7], loss=loss)
    assert next_frozen(Guarded(INNER), history, 12) == stop
    assert next_frozen(Guarded(INNER, then="take back"), history, 12) == back


def test_accuracy_comes_before_loss() -> None:
    history = validated([0, 4, 7], accuracy=[0.80, 0.85, 0.86], loss=[2.0, 1.0, 3.0])
    assert next_frozen(Guarded(INNER), history, 12) == 9


def test_a_smaller_drop_is_enough_where_asked() -> None:
    history = validated([0, 4, 7], accuracy=[0.80, 0.85, 0.849])
    assert next_frozen(Guarded(INNER, max_drop=0), history, 12) == 7
    assert next_frozen(Guarded(INNER, max_drop=0.5), history, 12) == 9


def test_before_the_first_epoch_the_inner_policy_answers() -> None:
    assert next_frozen(Guarded(ByHand([3, 5])), [], 12) == 3


@given(trainings())
def test_guard_without_validation_is_the_inner_policy(training: tuple[list[list[float]], int]) -> None:
    rows, num_layers = training
    assert follow(Guarded(GradientNorms()), rows, num_layers) == follow(GradientNorms(), rows, num_layers)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.none() | st.floats(0, 1), st.none() | st.floats(-9, 9)), max_size=10),
    st.sampled_from(["stop", "take back"]),
)
def test_guard_stays_after_its_first_decision(rows: list[Any], then: Then) -> None:
    frozen, accuracy, loss = ([row[at] for row in rows] for at in range(3))
    history = validated(frozen, accuracy=accuracy, loss=loss)
    answers = [next_frozen(Guarded(INNER, then=then), history[:end], 12) for end in range(len(history) + 1)]
    dropped = [end for end in range(len(answers)) if answers[end] != INNER.after(end, 12)]
    assert len({answers[end] for end in range(dropped[0], len(answers))} if dropped else {0}) <= 1


@pytest.mark.parametrize("drop", [-0.1, 1, NAN])
def test_drops_out_of_range(drop: float) -> None:
    with pytest.raises(UsageError) as error:
        Guarded(INNER, max_drop=drop)
    assert (
        str(error.value)
        == f"max_drop, the accuracy that may be lost, must be at least 0 and below 1; got {drop}; use 0.01"
    )


def test_guard_must_stop_or_take_back() -> None:
    with pytest.raises(UsageError) as error:
        Guarded(INNER, then="shout")  # type: ignore[arg-type]
    assert str(error.value) == "a guard can 'stop' or 'take back', not 'shout'"
