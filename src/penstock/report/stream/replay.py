"""Replay of a recorded run with other costs: the time of the same work in the same order.

A device runs its jobs in order. For each it waits until its message has arrived, computes, waits for a free buffer and
sends the result. A cut holds `depth` messages at the sender and as many at the receiver, as in the engine:

    sent[k]   once it is made, the one before it is over, and the receiver has passed on message k - depth
    done[k]   not before message k - depth has been sent

Work that remains after a step shows in the waits of its stages. No process is faster than its CPU seconds over its
CPUs, but a step may be: the need of its process's other threads, and its lead over its share of a core, are its
backlog. A delayed step reduces it, and so does a wait:

    backlog grows by   (CPU seconds of the step, and of other threads meanwhile) / CPUs  -  the step's seconds
            falls by   the stage's waits for space or for a message; it is never below zero

Backlog reduced by a wait is attributed after the step before it: in a replay with a shorter wait, the next step must
begin later. So it is as uneven as in the run, and never more than the stage's wait there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import DataError
from penstock.plan.schedule.simulate import Channel, Edge, Job, Line, play
from penstock.report.stream.measured import MeasuredStage, Step, share


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A stage's work for a microbatch, as a sum of parts by name, so that parts can be left out; seconds.

    `after` is work that the device needs before its next job and that nothing waits for; it also proceeds while the
    device waits for a free buffer.
    """

    source: Edge | None
    target: Edge
    parts: Mapping[str, float]
    after: Mapping[str, float] = field(default_factory=dict)

    def job(self, counted: frozenset[str], channels: Mapping[Edge, Channel]) -> Job:
        """Convert this to a job of the simulator, with the counted parts."""
        return Job(
            seconds=_sum(self.parts, counted), after_s=_sum(self.after, counted),
            source=channels[self.source] if self.source is not None else None, target=channels[self.target],
        )  # fmt: skip


def _sum(parts: Mapping[str, float], counted: frozenset[str]) -> float:
    return sum(value for name, value in parts.items() if name in counted)


def replay(
    devices: Sequence[Sequence[Recorded]], counted: frozenset[str], wires: Mapping[Edge, Sequence[float]], *, depth: int
) -> float:
    """Replay every device's work with the counted parts; return the total seconds.

    `wires[edge][k]` are the seconds in flight of message `k`, zero if an edge is missing.

    Example:
        seconds = replay(devices, frozenset({"compute"}), {}, depth=2)

    Raises `DataError` on a deadlock, which a real run cannot have.
    """
    channels: dict[Edge, Channel] = {}
    for done in (done for own in devices for done in own):
        for edge in (done.source, done.target):
            if edge is not None and edge not in channels:
                channels[edge] = Channel(wire_s=wires.get(edge) or (0.0,))
                # the driver's loads and received results do not wait for its own buffers
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
    """Seconds that follow a step: for computing that was early, for the process's other threads, for loading."""

    early_s: float
    others_s: float
    load_s: float


def backlog_in_waits(mates: Sequence[MeasuredStage], threads: int) -> dict[int, list[Backlog]]:
    """Return for each stage of one process what waits have paid after each of its steps.

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
    """Return the CPU seconds per step of a process's threads that do not compute, loading apart."""
    own_s = sum(mate.mean("cpu_s") + mate.mean("between_cpu_s") for mate in mates)
    return max(0.0, mates[0].cpu_s - own_s) / len(mates)


def _lacks(
    stage: MeasuredStage, step: Step, others_cpu_s: float, num_mates: int, threads: int
) -> tuple[float, float, float]:
    """Return a step's missing seconds, cumulatively: its own computing, other threads, loading."""
    without = (step.cpu_s + step.between_cpu_s + others_cpu_s) / stage.machine.cpus - step.busy_s
    early = step.cpu_s / share(stage.machine) - step.compute_s if threads == 1 else 0.0
    return min(early, without), without, without + stage.load_cpu_s / stage.machine.cpus / num_mates


def _paid(steps: Sequence[Step], lacks: Sequence[float]) -> list[float]:
    """Return the backlog reduced by waits after each step."""
    paid: list[float] = []
    backlog_s = 0.0
    for step, lack in zip(steps, lacks, strict=True):
        if paid:  # the first one waits for the stream to begin
            before_s = min(backlog_s, step.arrived_s - step.asked_s)
            paid[-1] += before_s
            backlog_s -= before_s
        backlog_s = max(0.0, backlog_s + lack)
        paid.append(min(backlog_s, step.buffer_s))
        backlog_s -= paid[-1]
    return paid
