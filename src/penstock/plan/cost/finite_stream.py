"""When each microbatch of a finite stream is done: filling and draining included, buffers bounded.

What the executor does, as a recurrence over microbatches `m` and stages `s` with `depth` buffers on both sides
of a cut:

    compute   begins when the stage is free and m is there
    done      when it has computed, and one of its buffers is free:   sent[s][m - depth]
    sending   begins when m is done, the link is free, and the next stage has a buffer:  done[s + 1][m - depth]
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What a stage takes: seconds of compute for each cut set, and of its incoming link.

    `compute_s[server][cut_set]`: several servers are devices that take turns, in the order of `order`.
    `wire_s[cut_set]` is how long a message from the stage before is on the wire, `latency_s` what it takes beside.
    """

    compute_s: tuple[tuple[float, ...], ...]
    wire_s: tuple[float, ...]
    latency_s: float = 0.0
    order: tuple[int, ...] = (0,)


def result_times(
    stages: Sequence[StageTimes], turns: Sequence[int], num_microbatches: int, *, depth: int = 2,
    feed_s: float = 0.0, back_s: Sequence[float] = (0.0,),
) -> list[float]:  # fmt: skip
    """Return the second at which each microbatch's result is back where it was fed.

    `turns` says which cut set each microbatch takes, `feed_s` what a feeder that holds no stage needs for each,
    `back_s[cut_set]` the way back to it.

    >>> stage = StageTimes(compute_s=((1.0,),), wire_s=(0.0,))
    >>> result_times([stage, stage], (0,), 3)
    [2.0, 3.0, 4.0]
    """
    runs = [_Run(stage) for stage in stages]
    results: list[float] = []
    for microbatch in range(num_microbatches):
        cut_set = turns[microbatch % len(turns)]
        ready = feed_s * (microbatch + 1)
        for index, run in enumerate(runs):
            before = runs[index - 1] if index else None
            arrived = run.receive(ready, microbatch, depth, cut_set)
            if before is not None:
                before.sent.append(arrived)
            ready = run.compute(arrived + run.times.latency_s, microbatch, depth, cut_set, last=index == len(runs) - 1)
        results.append(ready + back_s[cut_set % len(back_s)])
    return results


def steady_s(
    stages: Sequence[StageTimes], turns: Sequence[int], *, depth: int = 2, feed_s: float = 0.0, rounds: int = 4
) -> float:
    """Return the seconds between results once the pipeline runs full, with cut sets taking turns.

    Short queues do not absorb every difference between cut sets; this counts what is lost.
    """
    length = max(len(turns) * max(stage_servers(stages), 1), 2 * len(stages) + 2)
    times = result_times(stages, turns, rounds * length, depth=depth, feed_s=feed_s)
    half = rounds // 2 * length
    return (times[-1] - times[half - 1]) / (len(times) - half)


def stage_servers(stages: Sequence[StageTimes]) -> int:
    """Return the largest number of devices that share a stage."""
    return max(len(stage.order) for stage in stages)


class _Run:
    """One stage under way: when its messages came, were computed and were sent."""

    def __init__(self, times: StageTimes) -> None:
        self.times = times
        self.arrived: list[float] = []
        self.done: list[float] = []
        self.sent: list[float] = []
        self.free = [0.0] * len(times.compute_s)

    def receive(self, ready: float, microbatch: int, depth: int, cut_set: int) -> float:
        """Return when a message that was ready then has come over the link."""
        begin = ready
        if self.arrived:
            begin = max(begin, self.arrived[-1])
        held = microbatch - depth * len(self.free)
        if held >= 0:
            begin = max(begin, self.done[held])
        self.arrived.append(begin + self.times.wire_s[cut_set])
        return self.arrived[-1]

    def compute(self, there: float, microbatch: int, depth: int, cut_set: int, *, last: bool) -> float:
        """Return when a microbatch is computed and laid out in a free buffer."""
        server = self.times.order[microbatch % len(self.times.order)]
        end = max(there, self.free[server]) + self.times.compute_s[server][cut_set]
        held = microbatch - depth * len(self.free)
        if not last and held >= 0:
            end = max(end, self.sent[held])
        self.free[server] = end
        # results of devices that take turns leave in order
        self.done.append(max(end, self.done[-1]) if self.done else end)
        return self.done[-1]
