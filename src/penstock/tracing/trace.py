"""Files of a traced run: one for each process, and one with facts about the run."""

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import DataError, UsageError
from penstock.files import write_whole
from penstock.tracing.record import FEEDER_STAGE, Alignment, Reading

RUN_FILE = "run.json"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """An interval of time, in seconds on the process's clock until `align` has been called."""

    kind: str
    name: str
    stage: int
    microbatch: int
    begin_s: float
    end_s: float
    num_bytes: int = 0
    cpu_s: float = 0.0
    step: int = 0
    detail: str = ""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.begin_s


class Counter(msgspec.Struct, frozen=True, array_like=True):
    """A value at a point in time."""

    name: str
    at_s: float
    value: float


class Alone(msgspec.Struct, frozen=True):
    """Costs per microbatch of a stage that runs alone on its device, without messages.

    Seconds, and CPU seconds of the computing thread.
    """

    stage: int
    seconds: float
    cpu_s: float


class MachineCapacity(msgspec.Struct, frozen=True):
    """Capacity of a device: seconds for a round of reference work, usable CPUs, and CPU seconds per byte sent.

    `memory_bytes` is the limit of a process, 0 if unknown. `byte_s` is the cost at one end of a message: laying it out
    or checking it, and passing it through the system's network code.
    """

    calibration_s: float = 0.0
    cpus: float = 1.0
    byte_s: float = 0.0
    memory_bytes: float = 0.0


class _Recorded(msgspec.Struct, frozen=True):
    """One process's record of one stream, without its spans."""

    rank: int
    device: str
    counters: tuple[Counter, ...] = ()
    alone: tuple[Alone, ...] = ()
    machine: MachineCapacity = MachineCapacity()
    readings: tuple[Reading, ...] = ()
    alignment: Alignment = Alignment()
    num_dropped: int = 0
    version: int = 1

    @property
    def peak_bytes(self) -> float:
        """Peak of the process's sampled memory, 0 without samples."""
        return max((counter.value for counter in self.counters if counter.name == "memory_bytes"), default=0.0)


class ProcessTrace(_Recorded, frozen=True):
    """Everything that one process recorded during one stream."""

    spans: tuple[Span, ...] = ()

    def aligned(self) -> "ProcessTrace":
        """Return the trace with all times on the driver's clock."""
        align = self.alignment.align
        spans = tuple(msgspec.structs.replace(s, begin_s=align(s.begin_s), end_s=align(s.end_s)) for s in self.spans)
        counters = tuple(msgspec.structs.replace(c, at_s=align(c.at_s)) for c in self.counters)
        return msgspec.structs.replace(self, spans=spans, counters=counters)


class PackedTrace(_Recorded, frozen=True, kw_only=True, rename={"packed": "spans"}):
    """A received trace; its spans stay encoded until they are read, which takes a fifth of the memory."""

    packed: msgspec.Raw

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of the trace; raises `DataError` if they cannot be decoded."""
        try:
            return msgspec.json.decode(self.packed, type=tuple[Span, ...])
        except msgspec.MsgspecError as error:
            raise DataError(f"{self.device} sent spans that cannot be read: {error}; record again") from None

    def unpacked(self) -> ProcessTrace:
        """Return the trace with decoded spans."""
        recorded = {name: getattr(self, name) for name in _Recorded.__struct_fields__}
        return ProcessTrace(spans=self.spans, **recorded)

    def aligned(self) -> ProcessTrace:
        """Return the trace with all times on the driver's clock."""
        return self.unpacked().aligned()


StreamTrace = ProcessTrace | PackedTrace


class StageTotals(msgspec.Struct, frozen=True):
    """Totals of a stage over a stream, counted by its process."""

    stage: int
    device: str
    num_microbatches: int
    compute_s: float
    compute_cpu_s: float
    cpu_s: float
    wait_s: float
    send_s: float
    memory_bytes: float | None = None


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A generation request: its tokens, and the times of the request and of each token since the stream began."""

    num_prompt: int
    num_reused: int
    asked_s: float
    came_s: tuple[float, ...]


class GenerationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that generates: the kind of each microbatch, the requests, and the caches.

    `microbatches` has "prompt", "step" or "guess" and the lane's number, -1 for a prompt.
    """

    microbatches: tuple[tuple[str, int], ...]
    requests: tuple[RequestTimes, ...]
    num_slots: int
    num_guesses: int
    num_right: int
    cache_bytes: tuple[int, ...]  # by stage


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the whole run.

    - `ranks`: the process of every stage, pipeline by pipeline; `pipelines`: the number of stages of each parallel
      pipeline; microbatch m uses pipeline `turns[m % len(turns)]`;
    - `devices`: each rank's name; `hosts`: its name in plans;
    - `bandwidths`: bytes per second of each rank's link, where known;
    - `generation`: set if a language model generated text; a row is then a token;
    - `units`: the model's parts between possible cuts: for each, the cut before it, counted work, bytes sent there.
    """

    kind: str
    model: str
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    num_microbatches: int = 0
    num_rows: int = 0
    depth: int = 2
    threads: int = 1
    total_s: float = 0.0
    results_s: tuple[float, ...] = ()
    bandwidths: tuple[float | None, ...] = ()
    stages: tuple[StageTotals, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    plan: dict[str, Any] | None = None
    units: tuple[tuple[str, float, float], ...] = ()
    num_steps: int = 0
    schedule: str = ""
    pipelines: tuple[int, ...] = ()
    turns: tuple[int, ...] = (0,)
    generation: GenerationFacts | None = None
    version: int = 1

    @property
    def routes(self) -> tuple[range, ...]:
        """The stages of each pipeline, by their indices in `ranks`."""
        ends = list(accumulate(self.pipelines or (len(self.ranks),)))
        return tuple(range(begin, end) for begin, end in zip((0, *ends), ends, strict=False))

    def pipeline_of(self, microbatch: int) -> int:
        """Return the pipeline of a microbatch."""
        return self.turns[microbatch % len(self.turns)]


class Run(msgspec.Struct, frozen=True):
    """Contents of a run's folder: facts and process traces, all on the driver's clock."""

    facts: RunFacts
    processes: tuple[ProcessTrace, ...]

    @property
    def spans(self) -> list[Span]:
        """Spans of all processes in the order in which they begin."""
        return sorted((s for process in self.processes for s in process.spans), key=lambda s: s.begin_s)


def make_run(facts: RunFacts, processes: Iterable[StreamTrace]) -> Run:
    """Assemble a run on one clock, with the stages and microbatches of parallel pipelines numbered consecutively."""
    aligned = [process.aligned() for process in processes]
    if len(facts.routes) > 1:
        numbers = [
            [m for m in range(facts.num_microbatches) if facts.pipeline_of(m) == pipeline]
            for pipeline in range(len(facts.routes))
        ]
        aligned = [_numbered_through(process, facts, numbers) for process in aligned]
    return Run(facts, tuple(aligned))


def _numbered_through(process: ProcessTrace, facts: RunFacts, numbers: Sequence[Sequence[int]]) -> ProcessTrace:
    """Return a process's trace with its pipeline's numbers replaced by those of the whole run."""
    own = next((p for p, route in enumerate(facts.routes) if process.rank in facts.ranks[route.start : route.stop]), 0)

    def numbered(span: Span) -> Span:
        if span.kind == "load":
            return span
        pipeline = own if span.stage >= 0 else FEEDER_STAGE - span.stage
        here = numbers[pipeline]
        # a span without a number is the end of the stream
        microbatch = here[span.microbatch] if span.microbatch < len(here) else facts.num_microbatches + span.microbatch
        stage = facts.routes[pipeline].start + span.stage if span.stage >= 0 else FEEDER_STAGE
        return msgspec.structs.replace(span, stage=stage, microbatch=microbatch)

    start = facts.routes[own].start
    return msgspec.structs.replace(
        process,
        spans=tuple(map(numbered, process.spans)),
        alone=tuple(msgspec.structs.replace(alone, stage=start + alone.stage) for alone in process.alone),
    )


def write_run(folder: str | os.PathLike[str], facts: RunFacts, processes: Sequence[StreamTrace]) -> None:
    """Write a run's files, which replace those of an earlier run in the same folder.

    Example:
        write_run("runs/one", facts, traces)

    Raises `UsageError` if the folder cannot be written.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob("trace-*.json"):
            old.unlink()
        write_whole(place / RUN_FILE, msgspec.json.format(msgspec.json.encode(facts), indent=1))
        for process in processes:
            write_whole(place / f"trace-{process.rank}.json", msgspec.json.encode(process))
    except OSError as error:
        raise UsageError(f"{place} cannot be written ({error.strerror}); choose another folder") from None


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run's folder; raises `DataError` if it is not one.

    Example:
        read_run("runs/one").facts.total_s
    """
    place = Path(folder)
    if not (place / RUN_FILE).is_file():
        raise DataError(
            f"{place} is not the folder of a run: {RUN_FILE} not found; make one with infer or train --trace {place}"
        )
    try:
        facts = msgspec.json.decode((place / RUN_FILE).read_bytes(), type=RunFacts)
        files = sorted(place.glob("trace-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
        processes = [msgspec.json.decode(file.read_bytes(), type=ProcessTrace) for file in files]
    except (msgspec.MsgspecError, ValueError, OSError, RecursionError) as error:
        raise DataError(f"{place} does not hold a valid run: {error}; run it again with --trace") from None
    return make_run(facts, processes)
