"""Reports of steps on every rank, and the outcome of a step from all ranks."""

import math
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from penstock.errors import RunError
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.loss_convention import MeasuredLoss
from penstock.train.losses import total_count
from penstock.train.step import StepReport, mean_loss, step_document
from tests.models import seeded
from tests.trainers import in_threads, make_trainer

WIDTH = 64


def steps(size: int, **settings: Any) -> list[tuple[StepReport, float]]:
    """One step on so many processes: each one's report, and the seconds that it took."""
    captured = Captured(
        seeded(torch.nn.Sequential, *[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]).train(),
        (torch.zeros(2, WIDTH),),
    )

    def script(world: World) -> tuple[StepReport, float]:
        trainer = make_trainer(captured, world, **settings)
        x = torch.ones(4, WIDTH)
        begin = time.perf_counter()
        trainer.train_step(x, x, F.mse_loss)
        seconds = time.perf_counter() - begin
        own = [state for state in trainer.now.watch.stage_states() if state.name.endswith(f"rank {world.rank}")]
        assert [state.computed for state in own] == [2 * trainer.now.placed.num_microbatches]
        assert own[0].busy_s > 0.0 == own[0].queue
        trainer.close()
        return trainer.last_step, seconds

    return in_threads(size, script)


def test_a_pipeline_sends_activations_and_gradients() -> None:
    first, last = (report for report, _ in steps(2, stages=2, microbatches=2))
    crossing = 4 * WIDTH * 4  # four rows of float32
    for report in (first, last):
        assert crossing < report.sent_bytes < 3 * crossing  # headers and a small document
        assert (report.num_synchronizations, report.synchronized_bytes) == (0, 0)
        assert report.peak_memory_bytes > 2**20
    assert first.backward_s > 0.0


def test_replicas_send_sums_of_gradients() -> None:
    weights = 4 * (WIDTH * WIDTH + WIDTH) * 4
    for report, seconds in steps(2, replicas=2, stages=1):
        assert weights < report.sent_bytes < weights + 10_000  # of two: half of it twice
        assert report.num_synchronizations == 1
        assert report.synchronized_bytes == 4 * 4 * (WIDTH * WIDTH + WIDTH)
        assert report.forward_s + report.backward_s + report.wait_s + report.synchronize_s <= seconds


def test_one_process_sends_nothing() -> None:
    ((report, seconds),) = steps(1)
    assert report.sent_bytes == 0
    assert 0.0 < report.forward_s + report.backward_s <= seconds


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
