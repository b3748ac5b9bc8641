"""Collective calls of a training run: all ranks must make the same calls in order; mismatches are reported.

Each process numbers its calls. Exchanged objects carry the call's name; heartbeats carry its number and name:

    rank 0   … 16 train_step   17 evaluate      waits for all
    rank 1   … 16 train_step   17 train_step    waits for all       ──▶ rank 0 ends both waits
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import ConnectionBroken, RunError, UsageError
from penstock.text import one_line

_CALL = "call"
_LOADING = "the loader"
_AFTER = " after "  # between the name of a call and the error that led to it
UNNUMBERED = 0  # number of a call in a run that processes join later, which count from 1
MOST_OF_CALL = 300  # characters of a call that another process sends
ADVICE = "every rank must call every method, in the same order; move the call out of `if rank == 0`"


class Calls:
    """Collective calls of one process.

    Example:
        with calls.entered("train_step"):
            gathered = calls.checked(all_gather(transport, calls.marked({"loss": 0.5})), names)
    """

    def __init__(self) -> None:
        self._number, self._name = 0, ""

    def current(self, *, numbered: bool) -> str:
        """Return the number and name of the current call; empty if none is running."""
        return f"{self._number if numbered else UNNUMBERED} {self._name}" if self._name else ""

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Run a call. Raises `RunError` if another process exits during it without reporting a reason."""
        if self._name:  # a call within another one
            yield
            return
        self._number, self._name = self._number + 1, name
        try:
            yield
        except ConnectionBroken as error:
            raise RunError(
                f"another process exited while this one calls {name} (call {self._number}): {ADVICE}"
            ) from error
        finally:
            self._name = ""

    def marked(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return an object tagged with the name of its call."""
        return {**own, _CALL: self._name or _LOADING}

    def checked(self, gathered: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the objects of all processes; raises `UsageError` if they belong to different calls."""
        called = [str(each.get(_CALL, ""))[:MOST_OF_CALL] for each in gathered]
        if other := next((rank for rank, name in enumerate(called) if _method(name) != _method(called[0])), None):
            raise UsageError(mismatch(0, called[0], other, called[other], names, self._number))
        return list(gathered)


def find_mismatch(current: Mapping[int, str], names: Sequence[str]) -> str | None:
    """Return the message for two ranks whose calls with the same number differ; None if all match.

    Calls without a number, which is 0, are not compared.

    >>> find_mismatch({0: "17 evaluate", 1: "17 train_step"}, ["desk", "board"]).partition(":")[0]
    'rank 0 (desk) calls evaluate where rank 1 (board) calls train_step (call 17 of each)'
    """
    current = {rank: call for rank, call in current.items() if not call.startswith(f"{UNNUMBERED} ")}
    waiting = [call for call in current.values() if call and _AFTER not in call]
    for rank, call in current.items():
        # an error within a call, or between two, is the reason why others wait, whatever their number
        if _AFTER in call and any(_method(other).split()[1:] != _method(call).split()[1:] for other in waiting):
            return mismatch(rank, call, rank, call, names, 0)
    first: dict[str, tuple[int, str]] = {}
    for rank, call in sorted(current.items()):
        number, _, name = call.partition(" ")
        other, said = first.setdefault(number, (rank, name)) if name else (rank, name)
        if _method(said) != _method(name):
            return mismatch(other, said, rank, name, names, int(number))
    return None


def describe_wait(current: Mapping[int, str], waiting: Mapping[int, bool], names: Sequence[str]) -> str | None:
    """Return the line that names a rank that waits in a call, and the ranks outside of any; None if there are none.

    >>> describe_wait({0: "17 train_step", 1: ""}, {0: True, 1: False}, ["desk", "board"])
    'rank 0 (desk) is in train_step and waits for rank 1 (board)'
    """
    waits = next((rank for rank, call in sorted(current.items()) if call and waiting[rank]), None)
    absent = [_named(rank, names) for rank, call in sorted(current.items()) if not call]
    if waits is None or not absent:
        return None
    name = _method(current[waits]).partition(" ")[2]
    return f"{_named(waits, names)} is in {name} and waits for {' and '.join(absent)}"


def named_after(method: str, error: BaseException | None) -> str:
    """Return the name of a call that follows from an error, which is then reported instead of the call.

    >>> named_after("close", None), named_after("close", ValueError("no file"))
    ('close', 'close after ValueError: no file')
    """
    if error is None or isinstance(error, GeneratorExit):
        return method
    return f"{method}{_AFTER}{type(error).__name__[:60]}: {one_line(error)}"


def _method(call: str) -> str:
    return call.partition(_AFTER)[0]


def mismatch(rank: int, name: str, other: int, others: str, names: Sequence[str], number: int) -> str:
    """Return the message that names two calls and the ranks that make them, or the error that led to one of them."""
    for failed, call in ((rank, name), (other, others)):
        if why := call.partition(_AFTER)[2]:
            return f"{names[failed]}: {why}"
    return (
        f"{_named(rank, names)} calls {name} where {_named(other, names)} calls {others} (call {number} of each): "
        f"{ADVICE}"
    )


def _named(rank: int, names: Sequence[str]) -> str:
    """Return a rank with its name, which may begin with the rank.

    >>> _named(1, ["", "desk"]), _named(1, ["", "rank 1 on desk"])
    ('rank 1 (desk)', 'rank 1 on desk')
    """
    return names[rank] if names[rank].startswith(f"rank {rank} ") else f"rank {rank} ({names[rank]})"
