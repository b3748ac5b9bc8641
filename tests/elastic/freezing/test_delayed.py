"""A delayed policy answers as it would have in a training that began later."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.elastic.freezing import ByHand, ClosedForm, Delayed, GradientNorms
from penstock.errors import UsageError
from tests.elastic.freezing.records import follow, trainings


def test_delayed_closed_form_starts_an_epoch_later() -> None:
    assert follow(Delayed(ClosedForm(1 / 3)), [[1.0] * 12] * 9, 12) == [0, 0, 4, 7, 9, 10, 11, 11, 12, 12]


def test_delay_applies_to_layers_by_hand() -> None:
    assert follow(Delayed(ByHand([3, 5]), num_epochs=2), [[1.0] * 12] * 4, 12) == [0, 0, 3, 5, 5]


@given(trainings(), st.integers(1, 9))
def test_only_the_epochs_after_the_delay_count(training: tuple[list[list[float]], int], num_epochs: int) -> None:
    rows, num_layers = training
    waited = min(num_epochs, len(rows) + 1)
    later = follow(GradientNorms(), rows[num_epochs:], num_layers) if num_epochs <= len(rows) else []
    assert follow(Delayed(GradientNorms(), num_epochs), rows, num_layers) == [0] * waited + later


@pytest.mark.parametrize("num_epochs", [0, -1])
def test_delay_must_be_at_least_one_epoch(num_epochs: int) -> None:
    with pytest.raises(UsageError) as error:
        Delayed(ClosedForm(), num_epochs)
    assert str(error.value) == f"the delay of freezing must be at least 1 epoch; got {num_epochs}; leave the delay out"
