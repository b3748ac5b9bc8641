"""Measurements of a training run: of each step from spans, and of steps, epochs and plans from its metrics.

Spans are all actions of all devices, and the time between them.
"""

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from penstock.errors import DataError
from penstock.report.stream_measured import NO_WAIT_S
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
            span.name,
            span.stage,
            span.microbatch,
            span.begin_s,
            span.seconds,
            span.cpu_s,
            asked_s=span.begin_s,
            arrived_s=span.begin_s,
            gave_s=span.end_s,
        )
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


METRICS_FILE = "metrics.jsonl"
# the largest integers that a browser represents exactly
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
T = TypeVar("T")


class PlanLine(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was chosen after a step: at the start of the run, and at each epoch with a decision.

    `epoch` is the epoch reached by then. The change to the plan took `migrate_s` and moved `moved_bytes` between
    processes; filling the cache of frozen layers' outputs took `fill_s`.
    """

    step: Count
    epoch: Count
    frozen_layers: Count
    num_layers: Count
    stages: Positive
    replicas: Positive
    cached: bool
    migrate_s: Seconds
    moved_bytes: Count
    fill_s: Seconds
    why: str


class EpochLine(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a finished epoch's line that is shown; `step` is the epoch's last step."""

    epoch: Count
    step: Count
    unit: str
    units_per_s: float
    train_loss: float | None = None
    validation_loss: float | None = None
    accuracy: float | None = None


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a step's line that is shown."""

    step: Count
    loss: float
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """A plan, and its epochs from `begin` up to `end` (exclusive); none if it was replaced immediately."""

    plan: PlanLine
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PlanTimeline:
    """Plans and epochs in the order of steps, with at least one plan."""

    plans: tuple[PlanLine, ...]
    epochs: tuple[EpochLine, ...]

    def spans(self) -> list[PlanSpan]:
        """Return the epochs of each plan; a plan after all epochs belongs to an unfinished epoch."""
        begins = [self._begin(plan) for plan in self.plans]
        last = max([begins[-1], *(epoch.epoch for epoch in self.epochs)])
        ends = [*begins[1:], last + 1]
        return [PlanSpan(plan, a, b) for plan, a, b in zip(self.plans, begins, ends, strict=True)]

    def _begin(self, plan: PlanLine) -> int:
        """Return the epoch of the step after a plan, found by steps, which are exact even if a run was resumed."""
        if not self.epochs:
            return plan.epoch
        return next((e.epoch for e in self.epochs if e.step > plan.step), self.epochs[-1].epoch + 1)


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Steps, epochs and plans of a run, each in the order of steps; without elastic training there are no plans."""

    steps: tuple[StepLine, ...]
    epochs: tuple[EpochLine, ...]
    plans: tuple[PlanLine, ...]

    @property
    def timeline(self) -> PlanTimeline | None:
        """The plans with the epochs; None if there are no plans."""
        return PlanTimeline(self.plans, self.epochs) if self.plans else None


def read_metrics(folder: str | os.PathLike[str]) -> RunMetrics | None:
    """Read the metrics in a training run's folder; None if it has none.

    Example:
        read_metrics("runs/vit").epochs[-1].accuracy

    Raises `DataError` for lines that are not metrics; an incomplete last line is ignored.
    """
    file = Path(folder) / METRICS_FILE
    if not file.is_file():
        return None
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}); copy the run's folder again") from None
    found = [_read(file, number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]
    made = RunMetrics(
        _of_kind(file, found, "step", StepLine),
        _of_kind(file, found, "epoch", EpochLine),
        _of_kind(file, found, "plan", PlanLine),
    )
    return made if made != RunMetrics((), (), ()) else None


def _read(file: Path, number: int, line: str) -> tuple[int, dict[str, Any]]:
    try:
        document = json.loads(line)  # accepts NaN, which losses may be
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DataError(f"line {number} of {file} is not a line of metrics; remove it, or copy the file again")
    return number, document


def _of_kind(file: Path, found: Sequence[tuple[int, dict[str, Any]]], kind: str, read_as: type[T]) -> tuple[T, ...]:
    """Return the lines of one kind in the order of steps."""
    made = []
    for number, document in found:
        if document.get("kind") == kind:
            try:
                made.append(msgspec.convert(document, read_as))
            except msgspec.ValidationError as error:
                raise DataError(
                    f"line {number} of {file} is not a line of kind {kind} ({error}); remove it, or copy the file again"
                ) from None
    return tuple(sorted(made, key=lambda line: line.step))  # type: ignore[attr-defined]
