"""Freezing policies: pure functions from the records of epochs to the number of frozen leading layers."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, takewhile
from typing import Literal, get_args

from penstock.elastic.epochs import (
    EpochRecord,
    FreezePolicy,
    check_share,
    exact_share,
    most_frozen,
    norms_of,
    relative_change,
)
from penstock.errors import UsageError

Then = Literal["stop", "take back"]
# tolerance: 0.90 - 0.89 is a little more than 0.01 in binary
_ROUNDING = 1e-9
_BY_HAND = re.compile(r"\d{1,9}(,\d{1,9})*", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}/\d{1,9}|\d{0,9}\.?\d{1,9}", re.ASCII)
_GUARDS: dict[str, Then] = {"guard": "stop", "take-back": "take back"}


@dataclass(frozen=True, slots=True)
class Never:
    """Never freezes a layer: a baseline for comparison."""

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:  # noqa: ARG002 -- of the protocol
        """Return 0."""
        return 0


@dataclass(frozen=True, slots=True)
class ByHand:
    """Listed numbers of frozen layers for epochs 0, 1, 2, ..., the last one also for later ones; they may decrease.

    >>> ByHand([0, 4, 7]).frozen_layers([], 12)
    0

    Raises `UsageError` for an empty list, and for values that are not integers of at least 0.
    """

    layers: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in self.layers):
            raise UsageError(
                "the numbers of frozen layers must be integers of at least 0, one per epoch; got "
                f"{list(self.layers)}; write them like 0,4,7"
            )

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:  # noqa: ARG002 -- of the protocol
        """Return the number of leading layers frozen in the next epoch."""
        return self.layers[min(len(history), len(self.layers) - 1)]


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Freezes ceil(L (1 - (1 - alpha)^t)) of L layers after t epochs: each epoch a share alpha of the remaining layers.

    In real numbers, L_t = L_{t-1} + alpha (L - L_{t-1}) is exactly L (1 - (1 - alpha)^t). `most_frozen` rounds up after
    each epoch, so it is never below this closed form and sometimes above: with 12 layers and alpha = 1/3 it freezes all
    12 after 6 epochs, the closed form after 7.

    >>> [ClosedForm(1 / 3).after(epochs, 12) for epochs in range(8)]
    [0, 4, 7, 9, 10, 11, 11, 12]

    Raises `UsageError` unless alpha is between 0 and 1.
    """

    alpha: float | Fraction = 1 / 3

    def __post_init__(self) -> None:
        check_share(self.alpha)

    def after(self, num_epochs: int, num_layers: int) -> int:
        """Return the number of layers frozen after n epochs."""
        return math.ceil(num_layers * (1 - (1 - exact_share(self.alpha)) ** num_epochs))

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        return self.after(len(history), num_layers)


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """The rule of PipeTransformer (He et al., ICML 2021, https://arxiv.org/abs/2102.03161); never unfreezes.

        L_t = min(L_{t-1} + alpha (L - L_{t-1}),  argmin over l = L_{t-1} .. L-1 of measure(l))

    As in its authors' code, measure(l) is the relative change of a layer's gradient norm since the previous epoch. As
    long as only one epoch has ended, it is the norm itself. Unlike in the formula, the layer at the argmin is frozen
    too, since otherwise a first layer that converges first would never be frozen. The bound is rounded up, so that the
    last layers are reached. If a norm is not finite, no further layers are frozen.

    Example:
        GradientNorms(alpha=1 / 4).frozen_layers(history, num_layers=12)

    Raises `UsageError` for an alpha that is not between 0 and 1, and for epochs without a norm for each layer.
    """

    alpha: float | Fraction = 1 / 3

    def __post_init__(self) -> None:
        check_share(self.alpha)

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        if not history:
            return 0
        frozen = history[-1].frozen_layers
        if frozen >= num_layers:
            return frozen
        measures = _measures(history, num_layers)[frozen:]
        if not all(map(math.isfinite, norms_of(history[-1], num_layers)[frozen:])) or not math.isfinite(min(measures)):
            return frozen
        converged = frozen + measures.index(min(measures)) + 1
        return min(most_frozen(frozen, self.alpha, num_layers), converged)


def _measures(history: Sequence[EpochRecord], num_layers: int) -> list[float]:
    now = norms_of(history[-1], num_layers)
    if len(history) == 1:
        return list(now)
    return [relative_change(a, b) for a, b in zip(norms_of(history[-2], num_layers), now, strict=True)]


@dataclass(frozen=True, slots=True)
class Plateau:
    """Freezes leading layers that are all stable, at most a share alpha of the trained layers per epoch.

    A layer is stable if it was trained in the last `patience` + 1 epochs and its gradient norm changed by at most
    `threshold` relative to the previous epoch, in each of the last `patience` epochs. A layer that still changes
    prevents the freezing of all later layers. Never unfreezes.

    Raises `UsageError` for arguments out of range, and for epochs without a norm per layer.
    """

    patience: int = 2
    threshold: float = 0.05
    alpha: float | Fraction = 1 / 3

    def __post_init__(self) -> None:
        check_share(self.alpha)
        if self.patience < 1:
            raise UsageError(f"patience must be at least 1 epoch; got {self.patience}; use 2")
        if not 0 < self.threshold < 1:
            raise UsageError(
                f"threshold, a relative change of gradient norms, must be between 0 and 1; got {self.threshold}; use "
                "0.05"
            )

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        if not history:
            return 0
        frozen = history[-1].frozen_layers
        last = history[-self.patience - 1 :]
        if len(last) <= self.patience:
            return frozen
        norms = [norms_of(record, num_layers) for record in last]

        def stands_still(layer: int) -> bool:
            trained = all(record.frozen_layers <= layer for record in last)
            return trained and all(relative_change(a[layer], b[layer]) <= self.threshold for a, b in pairwise(norms))

        run = sum(1 for _ in takewhile(stands_still, range(frozen, num_layers)))
        return min(most_frozen(frozen, self.alpha, num_layers), frozen + run)


@dataclass(frozen=True, slots=True)
class Delayed:
    """Applies `policy` as if training had begun `num_epochs` later; until then no layer is frozen.

    `policy` does not see these first epochs, during which the first layers, frozen first by every policy, can adapt to
    the new task.

    Example:
        Delayed(ClosedForm(1 / 3), num_epochs=1)  # of 12 layers 0, 0, 4, 7, 9, 10, 11, 11, 12

    Raises `UsageError` for less than one epoch.
    """

    policy: FreezePolicy
    num_epochs: int = 1

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise UsageError(
                f"the delay of freezing must be at least 1 epoch; got {self.num_epochs}; leave the delay out"
            )

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        if len(history) < self.num_epochs:
            return 0
        return self.policy.frozen_layers(history[self.num_epochs :], num_layers)


@dataclass(frozen=True, slots=True)
class Guarded:
    """Follows `policy` until an epoch with frozen layers validates worse than the best epoch before it.

    After the first worse epoch, the number of frozen layers is constant: as in that epoch if `then` is "stop", or as in
    the best epoch before it if `then` is "take back". Worse means an accuracy lower by more than `max_drop` or, without
    an accuracy, a loss higher by more than that fraction of the best loss. A value that is not finite is worse than any
    other. An epoch without frozen layers may become the best epoch but never counts as worse, since freezing did not
    cause its drop. Without validations `policy` alone decides.

    Example:
        Guarded(GradientNorms(), max_drop=0.02, then="take back")

    Raises `UsageError` unless 0 <= `max_drop` < 1 and `then` is "stop" or "take back".
    """

    policy: FreezePolicy
    max_drop: float = 0.01
    then: Then = "stop"

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < 1:
            raise UsageError(
                f"max_drop, the accuracy that may be lost, must be at least 0 and below 1; got {self.max_drop}; use "
                "0.01"
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
        """Return the first epoch that got worse, and the best epoch before it; None if there is none."""
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


def read_policy(text: str) -> FreezePolicy:
    """Parse a policy: its name, an argument after a colon, and a delay and a guard, each after a plus.

    Example:
        read_policy("gradient-norms:1/4+after:2+take-back:0.02")

    Raises `UsageError` for any other text, and for invalid arguments of policies.
    """
    name, *more = text.strip().split("+")
    policy = _read_policy(name, text)
    if more and more[0].partition(":")[0] == "after":
        policy = _read_delay(policy, more.pop(0), text)
    if not more:
        return policy
    kind, colon, drop = more[0].partition(":")
    if kind not in _GUARDS or len(more) > 1:
        raise _unknown(text)
    then = _GUARDS[kind]
    return Guarded(policy, max_drop=float(_number(drop, text)), then=then) if colon else Guarded(policy, then=then)


def _read_delay(policy: FreezePolicy, word: str, text: str) -> FreezePolicy:
    _, colon, count = word.partition(":")
    return Delayed(policy, num_epochs=_count(count, text)) if colon else Delayed(policy)


def _read_policy(name: str, text: str) -> FreezePolicy:
    if _BY_HAND.fullmatch(name):
        return ByHand([int(word) for word in name.split(",")])
    name, colon, argument = name.partition(":")
    known = POLICIES.get(name)
    if known is None or (colon and known.read is None):
        raise _unknown(text)
    return known.make(known.read(argument, text)) if colon and known.read else known.make()


def _count(word: str, text: str) -> int:
    if not _COUNT.fullmatch(word):
        raise _unknown(text)
    return int(word)


def _number(word: str, text: str) -> Fraction:
    _, _, denominator = word.partition("/")
    if not _NUMBER.fullmatch(word) or (denominator and not int(denominator)):
        raise _unknown(text)
    return Fraction(word)


def _unknown(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is not a freezing policy; use {policy_help()}, optionally followed by "
        "+after[:EPOCHS] and +guard[:DROP] or +take-back[:DROP]"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKind:
    """A policy by name: its class and, if it has an argument, the argument's display name and parser."""

    make: Callable[..., FreezePolicy]
    argument: str = ""
    read: Callable[[str, str], int | Fraction] | None = None


POLICIES: Mapping[str, PolicyKind] = {
    "none": PolicyKind(make=Never),
    "gradient-norms": PolicyKind(make=GradientNorms, argument="ALPHA", read=_number),
    "schedule": PolicyKind(make=ClosedForm, argument="ALPHA", read=_number),
    "plateau": PolicyKind(make=Plateau, argument="EPOCHS", read=_count),
}


def policy_help() -> str:
    """Describe the possible policies.

    >>> policy_help()
    'none, gradient-norms[:ALPHA], schedule[:ALPHA], plateau[:EPOCHS] or numbers of layers by epoch like 0,4,7'
    """
    names = (f"{name}[:{known.argument}]" if known.argument else name for name, known in POLICIES.items())
    return f"{', '.join(names)} or numbers of layers by epoch like 0,4,7"
