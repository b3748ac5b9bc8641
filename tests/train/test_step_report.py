"""What a step reports: its seconds, its bytes, its sums."""

import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.outcome import StepReport
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
