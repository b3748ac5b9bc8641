import math
from typing import Any

import pytest
import torch

from penstock.errors import RunError
from penstock.train.loss_convention import MeasuredLoss
from penstock.train.losses import total_count
from penstock.train.outcome import mean_loss, step_document


def told(*losses: tuple[float, float], **more: Any) -> dict[str, Any]:
    measured = {index: MeasuredLoss(torch.zeros(()), *loss, "count") for index, loss in enumerate(losses)}
    return step_document(measured, **({"nonfinite": [], "used": ["weight"], "unused": []} | more))


def test_losses_are_weighted_by_what_they_count() -> None:
    both = [told((6.0, 3), (2.0, 1)), told((4.0, 4))]
    assert total_count(both) == 8
    assert mean_loss(both, step=0, last_stage=1) == 12 / 8


def test_losses_are_told_in_the_order_of_microbatches() -> None:
    measured = {1: MeasuredLoss(torch.zeros(()), 2.0, 1, "count"), 0: MeasuredLoss(torch.zeros(()), 6.0, 3, "count")}
    assert step_document(measured, nonfinite=[], used=[], unused=[])["losses"] == [(6.0, 3), (2.0, 1)]


@pytest.mark.parametrize(
    ("stages", "where"),
    [([1], "came from stage 1;"), ([1, 0], "came from stage 0;"), ([], "stage 1, in the loss itself")],
)
def test_a_loss_that_is_not_finite_says_where_it_came_from(stages: list[int], where: str) -> None:
    with pytest.raises(RunError, match=where) as raised:
        mean_loss([told((math.nan, 1), nonfinite=stages)], step=4, last_stage=1)
    assert "the loss of step 4 is nan" in str(raised.value)
    assert getattr(raised.value, "everywhere", False)


def test_a_loss_over_nothing_is_refused() -> None:
    with pytest.raises(RunError, match="the loss of step 2 is undefined"):
        mean_loss([told((0.0, 0))], step=2, last_stage=0)


def test_unused_parameter_is_refused_in_the_first_step() -> None:
    first, second = told((1.0, 1), unused=["bias", "spare"], used=["weight"]), told((1.0, 1), used=["bias"])
    with pytest.raises(RunError, match=r"1 parameters .* first spare;"):
        mean_loss([first, second], step=0, last_stage=0)
    assert mean_loss([first, second], step=1, last_stage=0) == 1
