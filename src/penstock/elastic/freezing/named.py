"""Freezing policies by their command-line names."""

import re
from collections.abc import Callable
from fractions import Fraction

from penstock.elastic.freezing.by_hand import ByHand
from penstock.elastic.freezing.closed_form import ClosedForm
from penstock.elastic.freezing.delayed import Delayed
from penstock.elastic.freezing.gradient_norms import GradientNorms
from penstock.elastic.freezing.guard import Guarded, Then
from penstock.elastic.freezing.history import FreezePolicy
from penstock.elastic.freezing.never import Never
from penstock.elastic.freezing.plateau import Plateau
from penstock.errors import UsageError

_POSSIBLE = (
    "none, gradient-norms[:ALPHA], schedule[:ALPHA], plateau[:EPOCHS] or layers by epoch like 0,4,7, "
    "optionally followed by +after[:EPOCHS] and +guard[:DROP] or +take-back[:DROP]"
)
_BY_HAND = re.compile(r"\d{1,9}(,\d{1,9})*", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}/\d{1,9}|\d{0,9}\.?\d{1,9}", re.ASCII)
_GUARDS: dict[str, Then] = {"guard": "stop", "take-back": "take back"}


def read_policy(text: str) -> FreezePolicy:
    """Read a policy: its name, an argument after a colon, and a delay and a guard, each after a plus.

    Example:
        read_policy("gradient-norms:1/4+after:2+take-back:0.02")

    Raises `UsageError` for any other text, and as the policies do for their arguments.
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
    if name == "none" and not colon:
        return Never()
    shared: dict[str, Callable[..., FreezePolicy]] = {"gradient-norms": GradientNorms, "schedule": ClosedForm}
    if name in shared:
        return shared[name](_number(argument, text)) if colon else shared[name]()
    if name == "plateau":
        return Plateau(patience=_count(argument, text)) if colon else Plateau()
    raise _unknown(text)


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
    return UsageError(f"{text!r} is not a freezing policy; use {_POSSIBLE}")
