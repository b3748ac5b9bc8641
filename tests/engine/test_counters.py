"""Slow work and lost messages told apart."""

import json
import time
from itertools import pairwise

import pytest
import torch

from penstock.engine import stall
from penstock.engine.counters import ACTIVATIONS, COMPUTING, GRADIENTS, Counters, read_counters, write_counters
from penstock.engine.observer import Observer
from penstock.engine.stall import StallWatch
from penstock.engine.wiring import StageLink
from penstock.errors import TransportError
from penstock.plan.schedule.schedules import Action
from penstock.tensors import HOST
from penstock.tracing.record import FEEDER_STAGE, Recorder
from tests import pretend


def counted(taken: int = 0, run: int = 0, sent: int = 0, doing: str = "") -> Counters:
    return Counters(
        taken={ACTIVATIONS: taken, GRADIENTS: 0}, sent={ACTIVATIONS: sent, GRADIENTS: 0}, num_run=run, doing=doing
    )


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stall, "time", made)
    return made


class Pipe:
    """Two stages on two workers, and a feeder that waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stages = [counted(), counted()]
        self.feeder = counted()
        self.watch = self.watching(7, [1, 2])
        self.watch.begin()

    def watching(self, job: int, ranks: list[int]) -> StallWatch:
        bounds = [FEEDER_STAGE, *range(len(ranks)), FEEDER_STAGE]
        links = [StageLink(a, b, ACTIVATIONS, [()], ()) for a, b in pairwise(bounds)]
        holders = {stage: {rank: f"host{rank}"} for stage, rank in enumerate(ranks)}
        return StallWatch(
            job, links, [holders | {FEEDER_STAGE: {0: "feeder"}}], self.said, stall_s=10.0, own=self.feeder
        )

    def said(self) -> list[str]:
        return ["", *(write_counters(7, index + 1, {index: stage}) for index, stage in enumerate(self.stages))]

    def fed(self, number: int) -> None:
        self.feeder.sent[ACTIVATIONS] = number

    def after(self, seconds: float) -> str | None:
        self.clock.now += seconds
        stalled = self.watch.check()
        return None if stalled is None else stalled.message


def test_a_message_lost_before_a_stage(clock: Clock) -> None:
    pipe = Pipe(clock)
    pipe.fed(3)
    pipe.stages = [counted(3, 3, 3), counted(2, 2, 2)]
    pipe.feeder.taken[ACTIVATIONS] = 2
    assert pipe.after(1.0) is None
    assert pipe.after(9.0) is None
    stalled = pipe.after(1.0)
    assert stalled is not None
    assert stalled.startswith("stage 1 on host2 has waited 10 s for activations 3 of 3")
    assert "that stage 0 on host1 has sent it" in stalled


@pytest.mark.parametrize(
    ("fed", "stages", "expected"),
    [
        (1, [counted(), counted()], "stage 0 on host1 has waited 10 s for activations 1 of 1"),
        (1, [counted(1, 1, 1), counted(1, 1, 1)], "the driver has waited 10 s for activations 1 of 1"),
    ],
)
def test_stalled_stage_is_named(clock: Clock, fed: int, stages: list[Counters], expected: str) -> None:
    pipe = Pipe(clock)
    pipe.fed(fed)
    pipe.stages = stages
    pipe.after(0.0)
    assert (pipe.after(10.0) or "").startswith(expected)


def test_stage_without_its_program_is_named(clock: Clock) -> None:
    pipe = Pipe(clock)
    pipe.watch = pipe.watching(8, [1])  # what they say is of job 7
    pipe.after(0.0)
    assert "stage 0 on host1 has waited 10 s for its program and weights" in (pipe.after(10.0) or "")


def test_a_slow_stage_is_not_a_stall(clock: Clock) -> None:
    pipe = Pipe(clock)
    pipe.fed(1)
    pipe.stages[0] = counted(1, 0, 0, COMPUTING)
    for _ in range(100):
        assert pipe.after(9.0) is None
    pipe.stages[0] = counted(1, 1, 1)
    assert pipe.after(9.0) is None
    assert pipe.after(9.0) is None
    assert pipe.after(1.0) is not None


def test_progress_and_caller_time_postpone_a_stall(clock: Clock) -> None:
    pipe = Pipe(clock)
    for count in range(1, 20):
        pipe.fed(count)
        assert pipe.after(9.0) is None
    clock.now += 1000.0  # the caller's loop body
    pipe.watch.begin()
    assert pipe.watch.check() is None
    assert pipe.after(9.0) is None


BEAT = {
    "type": "stages", "job": 3, "rank": 1, "busy": False, "num_moved": 0,
    "stages": {"0": {"sent": {"activations": 1, "gradients": 0}, "taken": {"activations": 1, "gradients": 0},
                     "num_run": 1, "busy_s": 0.5, "doing": ""}},
}  # fmt: skip
STAGE = BEAT["stages"]["0"]  # type: ignore[index]


@pytest.mark.parametrize(
    "text", ["{", "7", "[3, 1]", "[" * 10_000, *map(json.dumps, [
        {**BEAT, "type": "stage"}, {**BEAT, "job": "3"}, {**BEAT, "rank": -1}, {**BEAT, "more": 1},
        {**BEAT, "stages": {"x": STAGE}}, {**BEAT, "stages": {"0": {**STAGE, "sent": {"activations": 1}}}},
        {**BEAT, "stages": {"0": {**STAGE, "taken": {"activations": -1, "gradients": 0}}}},
        {**BEAT, "stages": {"0": {**STAGE, "num_run": []}}}, {**BEAT, "stages": {"0": {**STAGE, "busy_s": "long"}}},
    ])]
)  # fmt: skip
def test_a_heartbeat_that_says_something_else_is_refused(text: str) -> None:
    with pytest.raises(TransportError, match="a heartbeat cannot be decoded"):
        read_counters(3, ["", text])


def test_heartbeats_come_back_as_they_were() -> None:
    (beat,) = read_counters(3, ["", json.dumps(BEAT), write_counters(4, 0, {})])
    assert read_counters(3, [write_counters(3, 1, beat.stages)]) == [beat]
    assert (beat.rank, beat.stages[0].num_run, beat.stages[0].sent[ACTIVATIONS]) == (1, 1, 1)


def test_spans_of_a_gpu_are_those_of_its_events(pretended: torch.device) -> None:
    """A recorded action is queued like any other; its span is on the recorder's clock all the same."""
    observer = Observer([0])
    observer.recorder = recorder = Recorder()
    began_s = recorder.clock()
    settled = pretend.module.num_settled
    for microbatch in range(3):
        action = Action("F", microbatch, 0)
        observer.starts(action, None)
        with observer.computing(action, pretended, shared=False):
            time.sleep(0.01)
    observer.settle()
    assert pretend.module.num_settled == settled
    spans = [(begin_s, end_s) for kind, *_, begin_s, end_s, _, _, _, _ in recorder.spans if kind == "compute"]
    assert [end_s - begin_s > 0.009 for begin_s, end_s in spans] == [True] * 3
    moments = [began_s, *(moment for span in spans for moment in span), recorder.clock()]
    assert moments == sorted(moments)
    assert sum(end_s - begin_s for begin_s, end_s in spans) == pytest.approx(observer.seconds[0].forward_s)


def test_quota_counts_as_computing_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has rested computes at full speed until its quota is used up: its CPU time by that is what counts."""
    monkeypatch.setattr("penstock.engine.observer.cpu_quota", lambda: 0.25)
    observer = Observer([0])
    observer.starts(Action("F", 0, 0), None)
    with observer.computing(Action("F", 0, 0), HOST, shared=True):
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
    counters = observer.counters[0]
    assert counters.needed_s >= max(0.08, counters.busy_s)
