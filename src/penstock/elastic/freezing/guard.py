"""A guard around any policy: if validation gets worse, freezing ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.elastic.freezing.history import EpochRecord, FreezePolicy
from penstock.errors import UsageError

Then = Literal["stop", "take back"]
# 0.90 - 0.89 is a little more than 0.01 in binary
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Guarded:
    """Another policy's answers, until an epoch with frozen layers validates worse than the best before it.

    Worse is an accuracy lower by more than `max_drop`; in an epoch without one, a loss higher by more than that part
    of the best. A value that is not finite is worse than any. From then on as many layers stay frozen as in that
    epoch ("stop"), or as in the best one ("take back"). An epoch with nothing frozen only counts as a best: what it
    lost, it did not lose to freezing. Without any validation this is the inner policy.

    Example:
        Guarded(GradientNorms(), max_drop=0.02, then="take back")

    Raises `UsageError` for a drop that is not from 0 to 1, and for another `then`.
    """

    policy: FreezePolicy
    max_drop: float = 0.01
    then: Then = "stop"

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < 1:
            raise UsageError(
                f"max_drop, the accuracy that may be lost, must be from 0 to below 1; got {self.max_drop}; use 0.01"
            )
        if self.then not in get_args(Then):
            raise UsageError(f"a guard can {' or '.join(map(repr, get_args(Then)))}, not {self.then!r}")

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        found = self._first_drop(history)
        if found is None:
            return self.policy.frozen_layers(history, num_layers)
        worse, best = found
        return (worse if self.then == "stop" else best).frozen_layers

    def _first_drop(self, history: Sequence[EpochRecord]) -> tuple[EpochRecord, EpochRecord] | None:
        """Return the first epoch that got worse and the best one before it, or None."""
        best: dict[str, EpochRecord] = {}
        for record in history:
            kind = "accuracy" if record.accuracy is not None else "loss"
            value = getattr(record, kind)
            if value is None:
                continue
            before = best.get(kind)
            if before is not None and record.frozen_layers and self._is_worse(kind, getattr(before, kind), value):
                return record, before
            if math.isfinite(value) and (before is None or _gain(kind, getattr(before, kind), value) > 0):
                best[kind] = record
        return None

    def _is_worse(self, kind: str, before: float, now: float) -> bool:
        allowed = self.max_drop * (abs(before) if kind == "loss" else 1)
        return not math.isfinite(now) or -_gain(kind, before, now) > allowed + _ROUNDING


def _gain(kind: str, before: float, now: float) -> float:
    return now - before if kind == "accuracy" else before - now
