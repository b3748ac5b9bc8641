"""Numbers of layers by epoch, as the user wrote them; and none at all."""

from typing import Any

import pytest

from penstock.elastic.freezing import ByHand, Never
from penstock.errors import UsageError
from tests.elastic.freezing.records import follow

ROWS = [[1.0] * 12] * 5


@pytest.mark.parametrize(
    ("layers", "frozen"), [([0, 4, 7], [0, 4, 7, 7, 7, 7]), ([3], [3, 3, 3, 3, 3, 3]), ([0, 9, 2], [0, 9, 2, 2, 2, 2])]
)
def test_a_number_for_each_epoch(layers: list[int], frozen: list[int]) -> None:
    assert follow(ByHand(layers), ROWS, 12) == frozen


def test_a_list_that_changes_later_changes_nothing() -> None:
    layers = [0, 4]
    policy = ByHand(layers)
    layers[1] = 9
    assert follow(policy, ROWS, 12)[1] == 4


@pytest.mark.parametrize("layers", [[], [0, -4], [0, 1.5], [True], ["4"]])
def test_invalid_numbers_of_layers_are_refused(layers: list[Any]) -> None:
    with pytest.raises(UsageError) as error:
        ByHand(layers)
    assert f"got {layers}; " in str(error.value)


def test_policy_never_freezes_nothing() -> None:
    assert follow(Never(), ROWS, 12) == [0] * 6
