"""What a training records, on processes with clocks of their own, and what its report says of it."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from penstock.deploy.run_options import Trace
from penstock.group.world import World
from penstock.report.run_report import write_report
from penstock.tracing.trace import Run, read_run
from penstock.train.captured import Captured
from penstock.train.trainer import Trainer
from tests.models import seeded
from tests.trainers import in_threads, make_trainer

WIDTH, STEPS, ROWS = 32, 4, 8


def traced(
    folder: Path, size: int, *, recorded: Sequence[int] = range(STEPS), profiler: bool = False, **settings: Any
) -> Run:
    captured = Captured(
        seeded(torch.nn.Sequential, *[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]).train(),
        (torch.zeros(2, WIDTH),),
    )

    def script(world: World) -> None:
        world.clock = lambda: time.perf_counter() + 1000.0 * world.rank
        trainer = make_trainer(captured, world, trace=Trace(folder, profiler=profiler), **settings)
        optimizer = trainer.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for step in range(STEPS):
            assert trainer.tracer is not None
            trainer.tracer.record(step in recorded)
            with trainer.loading():
                x = torch.ones(ROWS, WIDTH)
            trainer.train_step(x, x, F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        trainer.write_trace("four layers")
        trainer.close()

    in_threads(size, script)
    return read_run(folder)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"schedule": "gpipe"}, ["F", "B"]),
        ({"schedule": "zero-bubble"}, ["F", "I", "W"]),
        ({"schedule": "1f1b", "checkpointing": True}, ["F", "R", "B"]),
    ],
)
def test_every_action_and_message_is_there_on_one_clock(
    tmp_path: Path, settings: dict[str, Any], kinds: list[str]
) -> None:
    run = traced(tmp_path, 2, stages=2, microbatches=4, **settings)
    assert abs(run.processes[1].alignment.offset_s + 1000.0) < 1.0
    every = Counter((s.step, s.microbatch) for s in run.spans if s.kind == "compute" and s.stage == 0)
    assert every == {(step, m): len(kinds) for step in range(STEPS) for m in range(4)}
    for stage in (0, 1):
        names = [s.name for s in run.spans if s.kind == "compute" and (s.stage, s.step, s.microbatch) == (stage, 1, 0)]
        assert names == kinds
    sent = [(s.name, s.num_bytes) for s in run.spans if s.kind == "send"]
    assert Counter(sent) == Counter((s.name, s.num_bytes) for s in run.spans if s.kind == "receive")
    assert Counter(name for name, _ in sent) == {"F": 4 * STEPS, "B": 4 * STEPS}
    slack_s = run.processes[1].alignment.error_s
    for step in range(STEPS):
        made, used = (
            next(s for s in run.spans if s.kind == "compute" and (s.stage, s.step) == (stage, step)) for stage in (0, 1)
        )
        assert used.begin_s > made.end_s - slack_s
    for process in run.processes:
        around = Counter(s.kind for s in process.spans if s.stage < 0)
        assert around == {"load": STEPS, "step": STEPS, "synchronize": STEPS, "update": STEPS}
        assert {c.name for c in process.counters} == {"memory_bytes", "rows"}


def test_steps_that_are_not_to_be_recorded_are_left_out(tmp_path: Path) -> None:
    run = traced(tmp_path, 2, stages=2, microbatches=4, recorded=(1, 3))
    for kind in ("compute", "wait", "receive", "buffer", "send"):
        assert {s.step for s in run.spans if s.kind == kind} == {1, 3}, kind


def test_replicas_and_their_sums(tmp_path: Path) -> None:
    run = traced(tmp_path, 2, stages=1, replicas=2, profiler=True)
    assert {(s.step, s.name) for s in run.spans if s.kind == "profile"} >= {(2, "aten::linear"), (2, "aten::mm")}
    assert {s.step for s in run.spans if s.kind == "profile"} == {2}
    sums = [s for s in run.spans if s.name == "sum"]
    assert len(sums) == 2 * STEPS
    assert {s.num_bytes for s in sums} == {4 * 4 * (WIDTH * WIDTH + WIDTH)}
    report = write_report(tmp_path)
    assert "schedule 1f1b" in report.lead[0]
    assert report.account.num_times == pytest.approx(2.0)
    assert abs(report.account.times("remainder")) < 0.5


def test_without_tracing_nothing_is_recorded() -> None:
    captured = Captured(seeded(torch.nn.Linear, WIDTH, WIDTH).train(), (torch.zeros(2, WIDTH),))

    def script(world: World) -> Trainer:
        trainer = make_trainer(captured, world)
        trainer.train_step(torch.ones(2, WIDTH), torch.ones(2, WIDTH), F.mse_loss)
        trainer.close()
        return trainer

    (trainer,) = in_threads(1, script)
    assert trainer.tracer is None
    assert trainer.now.observer.recorder is None
