"""How the processes of a run become another group: the first one calls, and who is left or waits answers.

    first process    call 2 ──────────────── members of 2: a, c, d ──▶ they meet again (`group/join.py`)
    others                    answer: a, c
    a newcomer       waits: d     answer: d

All of it stands in the first process's store, under the name of the run. Who is not among the members waits, and is
taken in by a later call: a process that stood still and wakes up late, a machine that comes back, a new one.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import RunError
from penstock.group.board import PatientStore, read_if_there
from penstock.group.links import Links, close_store
from penstock.transport.base import SILENCE_S
from penstock.version import __version__

_RUN_KEY = "penstock/again"
_OVER = "over"
_POLL_S = 0.1
ANSWER_S = 5.0  # in which those that are left answer a call
_MOST_FAILURES = 2
_NEWCOMERS_S = 1.0  # and those that wait, who may be gone


class Running(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a newcomer reads first: the name of the run, and what its processes are."""

    run: str
    penstock: str = __version__


class RollCall:
    """The first process's side: who waits, and who is still there.

    Example:
        roll = RollCall(store, run="5f0c")
        members = roll.call(2, expected=["a", "c"])
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run, self._over = store, run, False
        self._seen = 0
        self._waiting: list[str] = []
        self._failures: Counter[str] = Counter()
        store.set(_key(run, "call"), "0")
        store.add(_key(run, "waiting"), 0)
        store.set(_RUN_KEY, msgspec.json.encode(Running(run=run)).decode())

    def waiting(self) -> list[str]:
        """Return those that have asked to be taken in."""
        count = self._store.add(_key(self._run, "waiting"), 0)
        for number in range(self._seen + 1, count + 1):
            key = _key(self._run, "waiting", str(number))
            if not self._store.check([key]):
                break  # it has counted itself and not said who it is yet
            name = self._store.get(key).decode()
            self._seen = number
            if name not in self._waiting and self._failures[name] < _MOST_FAILURES:
                self._waiting.append(name)
        return list(self._waiting)

    def note_failure(self, names: Iterable[str]) -> None:
        """Take note that a group with these newcomers did not come together; after the second time they stay out."""
        self._failures.update(names)

    def call(
        self, generation: int, expected: Sequence[str], answer_s: float = ANSWER_S, *, takes_in: bool = True
    ) -> list[str]:
        """Call, and return who is in the group of this number: those expected, in order, then those that waited.

        Unless it `takes_in` those that wait, they go on waiting.
        """
        newcomers = [name for name in self.waiting() if name not in expected] if takes_in else []
        began = time.monotonic()
        self._store.set(_key(self._run, "call"), str(generation))
        there: set[str] = set()
        while True:
            there |= {
                name for name in (*expected, *newcomers) if name not in there and self._answered(generation, name)
            }
            waited_s = time.monotonic() - began
            if there.issuperset(expected) and (there.issuperset(newcomers) or waited_s > _NEWCOMERS_S):
                break
            if waited_s > answer_s:
                break
            time.sleep(_POLL_S / 2)
        if takes_in:  # who waited and does not answer is forgotten: one that is there after all asks again
            self._waiting = []
        members = [name for name in (*expected, *newcomers) if name in there]
        self._store.set(_key(self._run, "members", str(generation)), msgspec.json.encode(members).decode())
        return members

    def end(self) -> None:
        """Say that there will be no further group; nothing more can be called."""
        if not self._over:
            self._over = True
            self._store.set(_key(self._run, "call"), _OVER)
            close_store(self._store)

    def _answered(self, generation: int, name: str) -> bool:
        return self._store.check([_key(self._run, "answer", str(generation), name)])


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the processes of a run meet, as one of them sees it: at the first one's store.

    `links` are what it connects by, `address` is this process's own, on which it listens, `name` what people call it.
    """

    links: Links
    connect: Callable[[], Store]
    host: str
    port: int
    address: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a process needs to be in the run's next group: where its processes meet, and who is in this group.

    `members` are the names of this group's processes by rank, which no others have, and `own` is this one's; they stay
    the same from group to group. `roll` is the first process's.
    """

    rendezvous: Rendezvous
    run: str
    own: str
    members: tuple[str, ...]
    generation: int = 0
    silence_s: float = SILENCE_S  # for which a process may be silent
    roll: RollCall | None = None


def await_call(
    store: PatientStore, run: str, name: str, after: int, *, waits: bool = True
) -> tuple[int, list[str]] | None:
    """Answer calls until this process is a member of a group after one; returns its number and members.

    Returns None once the run is over, and for a process that does not wait once it was left out. Raises
    `RuntimeError` where the first process is gone or silent.
    """
    answered = 0
    while True:
        call = store.call(lambda s: s.get(_key(run, "call")).decode())
        if call == _OVER:
            return None
        if int(call) > max(after, answered):
            answered = int(call)
            store.call(partial(_answer, key=_key(run, "answer", str(answered), name)))
        if answered:
            members = store.call(partial(read_if_there, key=_key(run, "members", str(answered))))
            if members is not None:
                listed = msgspec.json.decode(members, type=list[str])
                if name in listed:
                    return answered, listed
                if not waits:
                    return None
                after, answered = answered, 0
                wait_to_be_taken_in(store, run, name)
        time.sleep(_POLL_S)


def wait_to_be_taken_in(store: PatientStore, run: str, name: str) -> None:
    """Put a process on the list of those that wait."""
    number = store.call(lambda s: s.add(_key(run, "waiting"), 1))
    store.call(lambda s: s.set(_key(run, "waiting", str(number)), name))


def read_run(store: PatientStore, where: str) -> tuple[str, int]:
    """Return the name of the run that a store serves, and the number of its group; raises `RunError` without one."""
    text = store.call(lambda s: read_if_there(s, _RUN_KEY))
    if text is None:
        raise RunError(f"the run at {where} takes nobody in; start it with --on-loss continue, or wait")
    try:
        running = msgspec.json.decode(text, type=Running)
    except (msgspec.MsgspecError, UnicodeError):
        raise RunError(f"the run at {where} is of another version of penstock; install {__version__} there") from None
    if running.penstock != __version__:
        raise RunError(
            f"processes of a run are alike, but penstock is {running.penstock} at {where} and {__version__} here; "
            "install the same everywhere"
        )
    call = store.call(lambda s: s.get(_key(running.run, "call")).decode())
    if call == _OVER:
        raise RunError(f"the run at {where} is over; start another one")
    return running.run, int(call)


def _answer(store: Store, key: str) -> None:
    store.set(key, "")


def _key(run: str, *parts: str) -> str:
    return "/".join((_RUN_KEY, run, *parts))
