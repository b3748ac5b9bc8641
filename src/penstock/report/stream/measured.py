"""Measurements of stages and messages, from the spans of a stream."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import DataError
from penstock.plan.schedule.simulate import Edge
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
        stages=tuple(stages), load_s=tuple(loads[m].seconds for m in range(count)), wires=wires,
        begin_s=loads[0].begin_s, total_s=facts.total_s, depth=facts.depth, routes=facts.routes, turns=facts.turns,
    )  # fmt: skip


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
        index=index, rank=rank, device=process.device, steps=tuple(steps), machine=process.machine,
        alone_s=_alone_s(run, index, process, steps),
        cpu_s=max(0.0, max(totals, default=0.0) - own_loads) / len(through), load_cpu_s=own_loads / len(through),
        share=part,
    )  # fmt: skip


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
