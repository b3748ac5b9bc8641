"""Slow work and lost messages told apart."""

import pytest

from penstock.engine import counters
from penstock.engine.counters import Progress, StallWatch, read_progress, write_progress
from penstock.errors import TransportError


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(counters, "time", made)
    return made


class Pipe:
    """Two stages on two workers, and a feeder that waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stages = [Progress(), Progress()]
        self.watch = StallWatch(7, [{1: "host1"}, {2: "host2"}], self.said, stall_s=10.0)
        self.watch.begin()

    def said(self) -> list[str]:
        return ["", *(write_progress(7, index + 1, {index: stage}) for index, stage in enumerate(self.stages))]

    def after(self, seconds: float) -> str | None:
        self.clock.now += seconds
        return self.watch.check()


def test_a_message_lost_before_a_stage(clock: Clock) -> None:
    pipe = Pipe(clock)
    pipe.watch.fed = 3
    pipe.stages = [Progress(3, 3, 3), Progress(2, 2, 2)]
    pipe.watch.got = 2
    assert pipe.after(1.0) is None
    assert pipe.after(9.0) is None
    stalled = pipe.after(1.0)
    assert stalled is not None
    assert stalled.startswith("stage 1 on host2 has waited 10 s for message 3 of 3 to it")
    assert "stage 0 on host1 sent it" in stalled


@pytest.mark.parametrize(
    ("fed", "stages", "expected"),
    [
        (1, [Progress(), Progress()], "stage 0 on host1 has waited 10 s for message 1 of 1"),
        (1, [Progress(1, 1, 1), Progress(1, 1, 1)], "the feeding process has waited 10 s for result 1"),
    ],
)
def test_the_place_is_named(clock: Clock, fed: int, stages: list[Progress], expected: str) -> None:
    pipe = Pipe(clock)
    pipe.watch.fed = fed
    pipe.stages = stages
    pipe.after(0.0)
    assert (pipe.after(10.0) or "").startswith(expected)


def test_a_stage_that_was_never_set_up(clock: Clock) -> None:
    pipe = Pipe(clock)
    pipe.watch = StallWatch(8, [{1: "host1"}], pipe.said, stall_s=10.0)  # what they say is of job 7
    pipe.after(0.0)
    assert "stage 0 on host1 has waited 10 s for its program and weights" in (pipe.after(10.0) or "")


def test_a_slow_stage_is_not_a_stall(clock: Clock) -> None:
    pipe = Pipe(clock)
    pipe.watch.fed = 1
    pipe.stages[0] = Progress(1, 0, 0)
    for _ in range(100):
        assert pipe.after(9.0) is None
    pipe.stages[0] = Progress(1, 1, 1)
    assert pipe.after(9.0) is None
    assert pipe.after(9.0) is None
    assert pipe.after(1.0) is not None


def test_anything_that_moves_and_the_callers_own_time_put_it_off(clock: Clock) -> None:
    pipe = Pipe(clock)
    for count in range(1, 20):
        pipe.watch.fed = count
        assert pipe.after(9.0) is None
    clock.now += 1000.0  # the caller's loop body
    pipe.watch.begin()
    assert pipe.watch.check() is None
    assert pipe.after(9.0) is None


@pytest.mark.parametrize(
    "text", ["{", "7", "[3, 1]", "[3, 1, [[0, 1]]]", "[3, 1, [[0, 1, 1, 1, 1, 1]]]", "[3, 1, [[[], 1, 1, 1, 0.5]]]",
             "[3, 1, [[0, -1, 1, 1, 0.5]]]", '["3", 1, []]', "[" * 10_000]
)  # fmt: skip
def test_a_heartbeat_that_says_something_else_is_refused(text: str) -> None:
    with pytest.raises(TransportError, match="a heartbeat does not say how far stages are"):
        read_progress(3, ["", text])
