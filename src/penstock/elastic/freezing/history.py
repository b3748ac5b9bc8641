"""Interface of freezing policies: the history, the protocol, and the check of a returned number."""

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.errors import UsageError


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finished epoch.

    `frozen_layers` leading layers were frozen during it. `gradient_norms` has for each layer the root of the sum of
    squares of its gradients over all steps, 0.0 for frozen ones. `loss` and `accuracy` are of a validation, if there
    was one.
    """

    epoch: int
    frozen_layers: int
    gradient_norms: tuple[float, ...]
    loss: float | None = None
    accuracy: float | None = None


class FreezePolicy(Protocol):
    """A policy that decides which layers are frozen; a custom class needs only this method.

    Example:
        class HalfAfterThree:
            def frozen_layers(self, history, num_layers):
                return num_layers // 2 if len(history) >= 3 else 0
    """

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers to freeze in the next epoch, given all epochs so far, none before the
        first.

        Must be deterministic, since each process and each resumed run calls it independently.
        """


def next_frozen(policy: FreezePolicy, history: Sequence[EpochRecord], num_layers: int) -> int:
    """Return a policy's number of leading layers to freeze in the next epoch.

    Raises `UsageError` for a value that is not a number of layers of this model.
    """
    answer = policy.frozen_layers(history, num_layers)
    name = type(policy).__name__
    if isinstance(answer, bool) or not isinstance(answer, int):
        raise UsageError(
            f"the policy {name} must return the number of layers to freeze, an int up to {num_layers}; got {answer!r}"
        )
    if not 0 <= answer <= num_layers:
        raise UsageError(
            f"the policy {name} would freeze {answer} layers of a model with {num_layers}; return 0 to {num_layers}"
        )
    return answer


def norms_of(record: EpochRecord, num_layers: int) -> tuple[float, ...]:
    """Return an epoch's gradient norms; raises `UsageError` unless there is one for each layer."""
    if len(record.gradient_norms) != num_layers:
        raise UsageError(
            f"epoch {record.epoch} must have {num_layers} gradient norms, one for each layer; got "
            f"{len(record.gradient_norms)}; record one for each layer, 0.0 for frozen ones"
        )
    return record.gradient_norms


def relative_change(before: float, now: float) -> float:
    """Return |now - before| / before; no change from zero to zero, an infinite one from zero to anything else.

    >>> relative_change(2.0, 1.5)
    0.25
    """
    if before == now == 0:
        return 0.0
    return abs(now - before) / before if before else math.inf
