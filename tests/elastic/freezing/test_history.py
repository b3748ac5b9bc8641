"""What a policy of one's own may answer."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from penstock.elastic.epochs import EpochRecord, next_frozen, norms_of, relative_change
from penstock.elastic.freezing import ByHand
from penstock.errors import UsageError
from tests.elastic.freezing.records import epochs


class Own:
    """A policy that answers what it was told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:  # noqa: ARG002
        answer: int = self.answer
        return answer


@pytest.mark.parametrize("answer", [0, 5, 12])
def test_a_number_of_layers_is_taken(answer: int) -> None:
    assert next_frozen(Own(answer), [], 12) == answer


@pytest.mark.parametrize("answer", [13, -1])
def test_policy_must_stay_within_the_layers(answer: int) -> None:
    with pytest.raises(UsageError) as error:
        next_frozen(Own(answer), [], 12)
    assert (
        str(error.value) == f"the policy Own would freeze {answer} layers, but at most 12 can be frozen; return 0 to 12"
    )


@pytest.mark.parametrize("answer", [None, 4.0, "4", True])
def test_policy_must_return_an_integer(answer: object) -> None:
    with pytest.raises(UsageError) as error:
        next_frozen(Own(answer), [], 12)
    assert str(error.value) == (
        f"the policy Own must return the number of layers to freeze, an int up to 12; got {answer!r}"
    )


def test_numbers_by_hand_for_a_larger_model_are_refused() -> None:
    with pytest.raises(UsageError, match=r"ByHand .* 14 layers, .* 12"):
        next_frozen(ByHand([0, 14]), epochs([1.0] * 12), 12)


def test_norms_are_one_for_each_layer() -> None:
    (record,) = epochs([1.0, 2.0])
    assert norms_of(record, 2) == (1.0, 2.0)
    with pytest.raises(UsageError) as error:
        norms_of(record, 3)
    assert str(error.value) == (
        "epoch 0 must have 3 gradient norms, one for each layer; got 2; record one for each layer, 0.0 for frozen ones"
    )


@pytest.mark.parametrize(
    ("before", "now", "change"), [(2.0, 1.5, 0.25), (2.0, 2.5, 0.25), (0.0, 0.0, 0.0), (0.0, 1e-9, float("inf"))]
)
def test_relative_changes(before: float, now: float, change: float) -> None:
    assert relative_change(before, now) == change


def test_epoch_record_round_trips_as_json() -> None:
    (record,) = epochs([1.0, 0.5], accuracy=[0.75])
    assert msgspec.json.decode(msgspec.json.encode(record), type=EpochRecord) == record
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"epoch": 0, "frozen_layers": 0, "gradient_norms": [], "more": 1}', type=EpochRecord)
