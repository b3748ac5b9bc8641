"""Records of epochs, the interface of freezing policies, and the share of layers that may freeze per epoch."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import msgspec

from penstock.errors import UsageError

# a float is read as the nearest fraction with a denominator up to this: 0.3333333333333333 is a third
_MAX_DENOMINATOR = 10**6


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished epoch.

    `frozen_layers` is the number of leading layers that were frozen. `gradient_norms` has for each layer the root of
    the sum of its squared gradients over all steps, 0.0 for frozen layers. `loss` and `accuracy` are from the
    validation, if any.
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
        """Return the number of leading layers to freeze in the next epoch, given all epochs so far (none at the start).

        Must be deterministic, since every process and every resumed run calls it independently.
        """


def next_frozen(policy: FreezePolicy, history: Sequence[EpochRecord], num_layers: int) -> int:
    """Return a policy's number of leading layers to freeze in the next epoch.

    Raises `UsageError` if the value is not a number of layers of this model.
    """
    answer = policy.frozen_layers(history, num_layers)
    name = type(policy).__name__
    if isinstance(answer, bool) or not isinstance(answer, int):
        raise UsageError(
            f"the policy {name} must return the number of layers to freeze, an int up to {num_layers}; got {answer!r}"
        )
    if not 0 <= answer <= num_layers:
        raise UsageError(
            f"the policy {name} would freeze {answer} layers, but at most {num_layers} can be frozen; return 0 to "
            f"{num_layers}"
        )
    return answer


def norms_of(record: EpochRecord, num_layers: int) -> tuple[float, ...]:
    """Return an epoch's gradient norms; raises `UsageError` unless there is one norm per layer."""
    if len(record.gradient_norms) != num_layers:
        raise UsageError(
            f"epoch {record.epoch} must have {num_layers} gradient norms, one for each layer; got "
            f"{len(record.gradient_norms)}; record one for each layer, 0.0 for frozen ones"
        )
    return record.gradient_norms


def relative_change(before: float, now: float) -> float:
    """Return |now - before| / before; 0 from zero to zero, infinity from zero to any other value.

    >>> relative_change(2.0, 1.5)
    0.25
    """
    if before == now == 0:
        return 0.0
    return abs(now - before) / before if before else math.inf


def check_share(alpha: float | Fraction) -> None:
    """Raise `UsageError` unless alpha is between 0 and 1."""
    if not 0 < alpha < 1:
        raise UsageError(
            f"alpha, the share of trained layers that one epoch may freeze, must be between 0 and 1; got {alpha}; "
            "use 1/3"
        )


def exact_share(alpha: float | Fraction) -> Fraction:
    """Return the simple fraction that a float stands for: as a float 1 - 2/3 exceeds 1/3, and 12 times it is over 4."""
    near = Fraction(alpha).limit_denominator(_MAX_DENOMINATOR)
    return near if 0 < near < 1 else Fraction(alpha)


def most_frozen(frozen_layers: int, alpha: float | Fraction, num_layers: int) -> int:
    """Return the largest number of layers to freeze next: the frozen layers plus a share of the others, rounded up.

    >>> most_frozen(4, 1 / 3, 12)
    7
    """
    return frozen_layers + math.ceil(exact_share(alpha) * max(0, num_layers - frozen_layers))
