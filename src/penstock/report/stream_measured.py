"""Measurements of stages and messages, from the spans of a stream, and the replay of a recorded run with other costs.

A replay tells the time that the same work takes in the same order. A device runs its jobs in order. For each it waits
until its message has arrived, computes, waits for a free buffer and sends the result. A cut holds `depth` messages at
the sender and as many at the receiver, as in the engine:

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

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import DataError
from penstock.plan.schedule.simulate import Channel, Edge, Job, Line, play
from penstock.tracing.record import FEEDER_STAGE
from penstock.tracing.trace import MachineCapacity, ProcessTrace, Run, Span
from penstock.wire import FEEDER

# a shorter wait means that the message had already arrived
NO_WAIT_S = 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTimes:
    """A microbatch on a stage: when its message arrived, and the seconds of each part."""

    microbatch: int
    asked_s: float
    arrived_s: float
    end_s: float
    read_s: float
    compute_s: float
    cpu_s: float
    buffer_s: float
    give_s: float
    gap_s: float
    between_cpu_s: float  # CPU time of the thread since the last computation
    num_bytes_in: int
    num_bytes_out: int

    @property
    def begin_s(self) -> float:
        """Time at which it began to compute."""
        return self.arrived_s + self.read_s

    @property
    def beside_s(self) -> float:
        """Seconds spent on its two messages and between spans."""
        return self.message_s + self.gap_s

    @property
    def busy_s(self) -> float:
        """Seconds without waiting."""
        return self.compute_s + self.beside_s

    @property
    def message_s(self) -> float:
        """Seconds for its two messages."""
        return self.read_s + self.give_s

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for its message, and for a free buffer for its result."""
        return self.arrived_s - self.asked_s + self.buffer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """A stage during a stream: its steps, its seconds alone, its device, its share of the microbatches."""

    index: int
    rank: int
    device: str
    steps: tuple[MicrobatchTimes, ...]
    alone_s: float
    machine: MachineCapacity
    cpu_s: float  # CPU time of its whole process per microbatch, except loading
    load_cpu_s: float
    share: float = 1.0

    def mean(self, field: str) -> float:
        """Return the mean of a field over the steps."""
        return statistics.fmean(getattr(step, field) for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStream:
    """A stream: its stages in order, the seconds of loading data, and the time in flight of each message.

    `routes` are the stages of each parallel pipeline, `turns` the order in which pipelines take microbatches.
    """

    stages: tuple[MeasuredStage, ...]
    load_s: tuple[float, ...]
    wires: Mapping[Edge, tuple[float, ...]]
    begin_s: float
    total_s: float
    depth: int
    routes: tuple[range, ...]
    turns: tuple[int, ...]

    def steps_of(self, microbatch: int) -> list[tuple[MeasuredStage, MicrobatchTimes]]:
        """Return the steps of a microbatch, stage by stage."""
        route = self.routes[self.turns[microbatch % len(self.turns)]]
        place = next(k for k, step in enumerate(self.stages[route.start].steps) if step.microbatch == microbatch)
        return [(self.stages[index], self.stages[index].steps[place]) for index in route]

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return len(self.load_s)


def measure_stream(run: Run) -> MeasuredStream:
    """Combine a stream's spans, stage by stage; raises `DataError` if some are missing."""
    facts = run.facts
    count = facts.num_microbatches
    if facts.kind != "stream" or not count:
        raise DataError(f"a completed stream is needed; got a run of kind {facts.kind!r} with {count} microbatches")
    if any(process.num_dropped for process in run.processes):
        raise DataError("the trace is incomplete because the run is too long; trace fewer microbatches")
    found: dict[tuple[str, int], dict[int, Span]] = defaultdict(dict)
    for process in run.processes:
        for span in process.spans:
            if span.kind != "unit" and span.microbatch < count:
                found[span.kind, span.stage][span.microbatch] = span
    loads = found["load", FEEDER_STAGE]
    if len(loads) < count:
        raise DataError("some processes' traces are missing; copy the whole folder of the run")
    stages: list[MeasuredStage] = []
    wires: dict[Edge, tuple[float, ...]] = {}
    for pipeline, route in enumerate(facts.routes):
        through = [m for m in range(count) if facts.pipeline_of(m) == pipeline]
        if not through:
            raise DataError(f"pipeline {pipeline} has had no microbatch; trace a stream of more of them")
        own = [_stage(run, index, found, through, len(through) / count) for index in route]
        wires |= _wires(own, found, through, facts.depth)
        stages += own
    return MeasuredStream(
        stages=tuple(stages),
        load_s=tuple(loads[m].seconds for m in range(count)),
        wires=wires,
        begin_s=loads[0].begin_s,
        total_s=facts.total_s,
        depth=facts.depth,
        routes=facts.routes,
        turns=facts.turns,
    )


def _stage(
    run: Run, index: int, found: Mapping[tuple[str, int], Mapping[int, Span]], through: Sequence[int], part: float
) -> MeasuredStage:
    rank = run.facts.ranks[index]
    process = next((p for p in run.processes if p.rank == rank), None)
    if process is None or not set(through) <= found["compute", index].keys():
        raise DataError(f"the trace of stage {index} is missing; copy the whole folder of the run")
    steps = []
    between = found["between", index]
    before_s: float | None = None
    began_s = found["load", FEEDER_STAGE][0].begin_s  # a stage's wait for the beginning of a stream is not part of it
    for m in through:
        wait, read, compute, buffer, give = (
            found[kind, index][m] for kind in ("wait", "receive", "compute", "buffer", "send")
        )
        gap = (compute.begin_s - read.end_s) + (buffer.begin_s - compute.end_s)
        gap += wait.begin_s - before_s if before_s is not None else 0.0
        before_s = give.end_s
        steps.append(MicrobatchTimes(
            microbatch=m, asked_s=min(max(wait.begin_s, began_s), wait.end_s), arrived_s=wait.end_s, end_s=give.end_s,
            read_s=read.seconds,
            compute_s=compute.seconds, cpu_s=compute.cpu_s, buffer_s=buffer.seconds, give_s=give.seconds,
            gap_s=max(0.0, gap), between_cpu_s=between[m].cpu_s if m in between else 0.0,
            num_bytes_in=read.num_bytes, num_bytes_out=give.num_bytes,
        ))  # fmt: skip
    totals = [stage.cpu_s for stage in run.facts.stages if run.facts.ranks[stage.stage] == rank]
    own_loads = sum(span.cpu_s for span in process.spans if span.kind == "load")
    return MeasuredStage(
        index=index,
        rank=rank,
        device=process.device,
        steps=tuple(steps),
        machine=process.machine,
        alone_s=_alone_s(run, index, process, steps),
        cpu_s=max(0.0, max(totals, default=0.0) - own_loads) / len(through),
        load_cpu_s=own_loads / len(through),
        share=part,
    )


def _alone_s(run: Run, index: int, process: ProcessTrace, steps: Sequence[MicrobatchTimes]) -> float:
    """Return the seconds of a stage alone, or its CPU time if other processes had the core even then."""
    alone = next((alone for alone in process.alone if alone.stage == index), None)
    if alone is None:
        return statistics.median(step.compute_s for step in steps)
    by_cpu = alone.cpu_s / share(process.machine)
    return by_cpu if run.facts.threads == 1 and alone.seconds > 1.15 * by_cpu else alone.seconds


def share(machine: MachineCapacity) -> float:
    """Return the fraction of a core that a thread gets on a device."""
    return min(1.0, machine.cpus)


def _wires(
    stages: Sequence[MeasuredStage],
    found: Mapping[tuple[str, int], Mapping[int, Span]],
    through: Sequence[int],
    depth: int,
) -> dict[Edge, tuple[float, ...]]:
    """Return the time in flight of each message, from when it could be sent.

    If the receiver waited, the time is observed. Otherwise the message arrived early: the usual time is used, or less
    if the message must have been faster.
    """
    wires: dict[Edge, tuple[float, ...]] = {}
    made = [found["load", FEEDER_STAGE][m].end_s for m in through]
    before: MeasuredStage | None = None
    for stage in [*stages, None]:
        edge = tuple(each.index if each is not None else FEEDER_STAGE for each in (before, stage))
        if stage is not None:
            arrivals = [(step.asked_s, step.arrived_s) for step in stage.steps]
            taken = [step.end_s for step in stage.steps]
        else:
            waits = found["wait", FEEDER_STAGE]
            arrivals = [(waits[m].begin_s, waits[m].end_s) for m in through]
            taken = []
        local = (stage.rank if stage is not None else FEEDER) == (before.rank if before is not None else FEEDER)
        wires[edge[0], edge[1]] = (0.0,) * len(through) if local else _wire(made, arrivals, taken, depth)
        if stage is not None:
            made, before = [step.end_s for step in stage.steps], stage
    return wires


def _wire(
    made: Sequence[float], arrivals: Sequence[tuple[float, float]], taken: Sequence[float], depth: int
) -> tuple[float, ...]:
    seen: list[float | None] = []
    most: list[float] = []
    last = made[0]
    for m, (asked, arrived) in enumerate(arrivals):
        begin = max(made[m], last, taken[m - depth] if taken and m >= depth else made[m])
        waited = arrived - asked > NO_WAIT_S
        seen.append(max(0.0, arrived - begin) if waited else None)
        most.append(max(0.0, asked - begin))
        # without a wait, the message arrived at an unknown time before it was requested
        usual = statistics.median([value for value in seen if value is not None] or [0.0])
        last = arrived if waited else min(asked, begin + usual)
    known = [value for value in seen if value is not None]
    usual = statistics.median(known) if known else 0.0
    return tuple(min(usual, limit) if value is None else value for value, limit in zip(seen, most, strict=True))


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
    steps = [
        (stage, step)
        for row in zip(*(stage.steps for stage in mates), strict=True)
        for stage, step in zip(mates, row, strict=True)
    ]
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
