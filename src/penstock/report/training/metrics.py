"""Steps, epochs and plans of a training run, read from its metrics."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from penstock.errors import DataError

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
