"""Replay of a recorded run with other costs: the time that the same work takes in the same order.

A device runs its jobs in order. For each it waits until its message has arrived, computes, waits for a free buffer and
sends the result. A cut holds `depth` messages at the sender and as many at the receiver, as in the engine:

    sent[k]   once it is computed, message k - 1 has been sent, and the receiver has passed on message k - depth
    done[k]   not before message k - depth has been sent

Work that remains after a step is done during the waits of its stages. A process cannot be faster than its CPU seconds
divided by its CPUs, but a single step can: the CPU time that its process's other threads still need, and its lead over
its share of a core, are its backlog. Delayed steps and waits reduce the backlog:

    backlog grows by   (CPU seconds of the step, and of other threads in this time) / CPUs  -  the step's seconds
            falls by   the stage's waits for space or for a message; it is never below zero

Backlog that a wait reduces is attributed to the step before the wait: in a replay with a shorter wait, the next step
must begin later. So the backlog is as uneven as in the run, and never more than the stage's wait there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import DataError
from penstock.plan.schedule.simulate import Channel, Edge, Job, Line, play
from penstock.report.stream.measured import MeasuredStage, MicrobatchTimes, share


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A stage's work for a microbatch, in seconds, as named parts that can be left out.

    `after` is work before the device's next job for which no message waits; it also proceeds while the device waits for
    a free buffer.
    """

    source: Edge | None
    target: Edge
    parts: Mapping[str, float]
    after: Mapping[str, float] = field(default_factory=dict)

    def job(self, counted: frozenset[str], channels: Mapping[Edge, Channel]) -> Job:
        """Convert to a job of the simulator, with the counted parts."""
        return Job(
            seconds=_sum(self.parts, counted),
            after_s=_sum(self.after, counted),
            source=channels[self.source] if self.source is not None else None,
            target=channels[self.target],
        )


def _sum(parts: Mapping[str, float], counted: frozenset[str]) -> float:
    return sum(value for name, value in parts.items() if name in counted)


def replay(
    devices: Sequence[Sequence[Recorded]], counted: frozenset[str], wires: Mapping[Edge, Sequence[float]], *, depth: int
) -> float:
    """Replay the work of all devices with the counted parts; return the total seconds.

    `wires[edge][k]` is the time in flight of message `k`; 0 if the edge is missing.

    Example:
        seconds = replay(devices, frozenset({"compute"}), {}, depth=2)

    Raises `DataError` on a deadlock, which a real run cannot have.
    """
    channels: dict[Edge, Channel] = {}
    for done in (done for own in devices for done in own):
        for edge in (done.source, done.target):
            if edge is not None and edge not in channels:
                channels[edge] = Channel(wire_s=wires.get(edge) or (0.0,))
                # the driver's loading and receiving do not wait for its own buffers
                if edge[0] >= 0:
                    channels[edge].at_sender = depth
                if edge[1] >= 0:
                    channels[edge].at_receiver = depth
    lines = [Line([done.job(counted, channels) for done in own]) for own in devices]
    if not play(lines):
        raise DataError("the trace is incomplete: some messages were never sent; run it again with --trace")
    ends = [line.ends[-1] for line in lines if line.ends]
    # results return to the driver
    ends += [channel.sent_s(len(channel.made) - 1) or 0.0 for edge, channel in channels.items() if edge[1] < 0]
    return max(ends, default=0.0)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Seconds of work after a step: for computing that was early, for the process's other threads, for loading."""

    early_s: float
    others_s: float
    load_s: float


def backlog_in_waits(mates: Sequence[MeasuredStage], threads: int) -> dict[int, list[Backlog]]:
    """Return for each stage of a process the backlog that waits reduced after each step.

    Example:
        backlog_in_waits([stage], threads=1)[stage.index][microbatch].others_s
    """
    steps = [(stage, step) for row in zip(*(stage.steps for stage in mates), strict=True)
             for stage, step in zip(mates, row, strict=True)]  # fmt: skip
    others_cpu_s = other_threads_cpu_s(mates)
    lacks = [_lacks(stage, step, others_cpu_s, len(mates), threads) for stage, step in steps]
    early, without, whole = (_paid([step for _, step in steps], lack) for lack in zip(*lacks, strict=True))
    found: dict[int, list[Backlog]] = {stage.index: [] for stage in mates}
    for (stage, _), e, w, all_of_it in zip(steps, early, without, whole, strict=True):
        found[stage.index].append(Backlog(e, w - e, all_of_it - w))
    return found


def other_threads_cpu_s(mates: Sequence[MeasuredStage]) -> float:
    """Return the CPU seconds per step of a process's threads that do not compute, except loading."""
    own_s = sum(mate.mean("cpu_s") + mate.mean("between_cpu_s") for mate in mates)
    return max(0.0, mates[0].cpu_s - own_s) / len(mates)


def _lacks(
    stage: MeasuredStage, step: MicrobatchTimes, others_cpu_s: float, num_mates: int, threads: int
) -> tuple[float, float, float]:
    """Return a step's missing seconds, as cumulative sums: computing, other threads, loading."""
    without = (step.cpu_s + step.between_cpu_s + others_cpu_s) / stage.machine.cpus - step.busy_s
    early = step.cpu_s / share(stage.machine) - step.compute_s if threads == 1 else 0.0
    return min(early, without), without, without + stage.load_cpu_s / stage.machine.cpus / num_mates


def _paid(steps: Sequence[MicrobatchTimes], lacks: Sequence[float]) -> list[float]:
    """Return the backlog that waits reduced after each step."""
    paid: list[float] = []
    backlog_s = 0.0
    for step, lack in zip(steps, lacks, strict=True):
        if paid:  # the first wait is for the beginning of the stream
            before_s = min(backlog_s, step.arrived_s - step.asked_s)
            paid[-1] += before_s
            backlog_s -= before_s
        backlog_s = max(0.0, backlog_s + lack)
        paid.append(min(backlog_s, step.buffer_s))
        backlog_s -= paid[-1]
    return paid
