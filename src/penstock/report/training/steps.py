"""Measurements of each training step from spans: all actions of all devices, and the time between them."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.errors import DataError
from penstock.report.stream.measured import NO_WAIT_S
from penstock.tracing.trace import ProcessTrace, Run, Span

# the first steps, which create connections and buffers
_WARM_UP = 2
# number of steps in an account; more steps would only repeat the pattern
MAX_STEPS = 200
# directions of an action's input and output messages: activations, gradients
_DIRECTION = {"F": "F", "B": "B", "I": "B"}
# sending stage, receiving stage, direction
Line = tuple[int, int, str]


@dataclass(slots=True)
class TimedAction:
    """An action of a device: F, B, I, W, or R (a recomputed forward), with seconds and bytes."""

    kind: str
    stage: int
    microbatch: int
    begin_s: float
    compute_s: float
    cpu_s: float
    asked_s: float
    arrived_s: float = 0.0
    read_s: float = 0.0
    buffer_s: float = 0.0
    give_s: float = 0.0
    gave_s: float = 0.0  # time at which its message was sent
    num_bytes: int = 0

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for its message, and for a free buffer for its result."""
        return max(0.0, self.arrived_s - self.asked_s) + self.buffer_s

    @property
    def message_s(self) -> float:
        """Seconds spent on its two messages."""
        return self.read_s + self.give_s

    @property
    def label(self) -> str:
        """Label as in pipeline diagrams."""
        return f"{self.kind}{self.microbatch}"


@dataclass(slots=True)
class DevicePart:
    """A device's part of a step, from the end of the previous step to the end of this step."""

    rank: int
    begin_s: float
    end_s: float
    load_s: float = 0.0
    update_s: float = 0.0  # the optimizer's update after the previous step
    synchronize_s: float = 0.0
    rest_s: float = 0.0  # other time of the executor within the step
    between_s: float = 0.0  # time of the caller's code between steps
    done: list[TimedAction] = field(default_factory=list)

    @property
    def computed_s(self) -> float:
        """Seconds in which it computed."""
        return sum(done.compute_s for done in self.done)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step of training: its number, its seconds, and each device's part by rank."""

    number: int
    seconds: float
    num_rows: int
    parts: Mapping[int, DevicePart]


@dataclass(frozen=True, slots=True)
class MeasuredTraining:
    """Steps after warm-up; `replicas` has the ranks of each pipeline's stages, `lines_s` the times of messages."""

    steps: tuple[StepTimes, ...]
    replicas: tuple[tuple[int, ...], ...]
    processes: Mapping[int, ProcessTrace]
    lines_s: Mapping[Line, float]

    @property
    def seconds(self) -> float:
        """Total seconds of the steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def num_rows(self) -> int:
        """Total rows of the steps."""
        return sum(step.num_rows for step in self.steps)

    def of_stage(self, rank: int, stage: int) -> list[TimedAction]:
        """Return all actions of a stage on a device."""
        return [done for step in self.steps for done in step.parts[rank].done if done.stage == stage]


def measure_training(run: Run) -> MeasuredTraining:
    """Combine a run's spans, step by step.

    Example:
        measure_training(read_run("runs/vit")).seconds

    Raises `DataError` unless all processes recorded at least two steps.
    """
    num_stages = len(run.facts.cuts) + 1
    ranks = run.facts.ranks
    replicas = tuple(tuple(ranks[at : at + num_stages]) for at in range(0, len(ranks), num_stages))
    processes = {process.rank: process for process in run.processes}
    if set(processes) != set(ranks):
        raise DataError("some processes' traces are missing; copy the whole folder of the run")
    parts = {rank: _parts(process) for rank, process in processes.items()}
    common = sorted(set.intersection(*(set(own) for own in parts.values())))
    numbers = common[min(_WARM_UP - 1, len(common) - 1) :][:MAX_STEPS]
    if not numbers:
        raise DataError(f"the run in {run.facts.model} has fewer than two steps; train a few more with --trace")
    rows = {rank: _rows(process) for rank, process in processes.items()}
    firsts = {replica[0] for replica in replicas}
    steps = []
    usual = {rank: statistics.median(part.between_s for part in own.values()) for rank, own in parts.items()}
    for number in numbers:
        here = {rank: own[number] for rank, own in parts.items()}
        # occasional work of the caller, such as evaluation, is not part of a step
        apart = min(max(0.0, part.between_s - usual[rank]) for rank, part in here.items())
        seconds = statistics.fmean(part.end_s - part.begin_s for part in here.values()) - apart
        for rank, part in here.items():
            part.between_s = min(part.between_s, usual[rank])
        steps.append(StepTimes(number, seconds, sum(rows[rank].get(number, 0) for rank in firsts), here))
    return MeasuredTraining(tuple(steps), replicas, processes, _lines(steps, replicas))


def _rows(process: ProcessTrace) -> dict[int, int]:
    """Return the rows of each step of a process."""
    counted = [int(counter.value) for counter in process.counters if counter.name == "rows"]
    numbers = [span.microbatch for span in process.spans if span.kind == "step"]
    return dict(zip(numbers, counted, strict=False))


def _parts(process: ProcessTrace) -> dict[int, DevicePart]:
    """Return a process's steps by number, without the first step."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in process.spans:
        spans[span.step].append(span)
    ends = [span for span in process.spans if span.kind == "step"]
    parts = {}
    for before, step in pairwise(ends):
        part = DevicePart(process.rank, before.end_s, step.end_s, done=_actions(spans[step.step]))
        # loading for an evaluation has the number of the following step
        part.load_s = next((s.seconds for s in reversed(spans[step.step]) if s.kind == "load"), 0.0)
        part.update_s = sum(s.seconds for s in spans[before.step] if s.kind == "update")
        part.synchronize_s = sum(s.seconds for s in spans[step.step] if s.kind == "synchronize" and s.name == "finish")
        known_s = sum(done.compute_s + done.wait_s + done.message_s for done in part.done) + part.synchronize_s
        part.rest_s = max(0.0, step.seconds - known_s)
        part.between_s = max(0.0, step.begin_s - before.end_s - part.load_s - part.update_s)
        parts[step.step] = part
    return parts


def _actions(spans: Sequence[Span]) -> list[TimedAction]:
    """Return a step's computations in order, each with its input and output messages."""
    messages = {(s.kind, s.name, s.stage, s.microbatch): s for s in spans if s.stage >= 0 and s.kind != "compute"}
    actions = []
    for span in sorted((s for s in spans if s.kind == "compute"), key=lambda s: s.begin_s):
        done = TimedAction(
            span.name, span.stage, span.microbatch, span.begin_s, span.seconds, span.cpu_s, asked_s=span.begin_s,
            arrived_s=span.begin_s, gave_s=span.end_s,
        )  # fmt: skip
        found = {
            kind: messages[kind, _DIRECTION[span.name], span.stage, span.microbatch]
            for kind in ("wait", "receive", "buffer", "send")
            if span.name in _DIRECTION and (kind, _DIRECTION[span.name], span.stage, span.microbatch) in messages
        }
        if "receive" in found:
            done.asked_s, done.arrived_s = found["wait"].begin_s, found["wait"].end_s
            done.read_s = found["receive"].seconds
            done.num_bytes += found["receive"].num_bytes
        if "send" in found:
            done.buffer_s, done.give_s = found["buffer"].seconds, found["send"].seconds
            done.gave_s = found["send"].end_s
            done.num_bytes += found["send"].num_bytes
        actions.append(done)
    return actions


def _lines(steps: Sequence[StepTimes], replicas: Sequence[Sequence[int]]) -> dict[Line, float]:
    """Return the usual times in flight of messages between stages, as observed when a receiver waited."""
    seen: dict[Line, list[float]] = defaultdict(list)
    for step in steps:
        for replica in replicas:
            done = [d for rank in set(replica) for d in step.parts[rank].done if d.kind in _DIRECTION]
            made = {(d.stage, _DIRECTION[d.kind], d.microbatch): d for d in done}
            last: dict[Line, float] = {}
            for taker in sorted(done, key=lambda d: d.begin_s):
                direction = _DIRECTION[taker.kind]
                source = taker.stage + (-1 if direction == "F" else 1)
                giver, line = made.get((source, direction, taker.microbatch)), (source, taker.stage, direction)
                if giver is None or replica[source] == replica[taker.stage]:
                    continue
                # messages on a link are sequential
                begin_s = max(giver.gave_s, last.get(line, giver.gave_s))
                waited = taker.arrived_s - taker.asked_s > NO_WAIT_S
                last[line] = taker.arrived_s if waited else begin_s
                if waited:
                    seen[line].append(max(0.0, taker.arrived_s - begin_s))
    return {line: statistics.median(values) for line, values in seen.items()}
