"""Roll calls: rank 0 calls a new group, and survivors and newcomers answer.

    rank 0           call 2 ──────────────── members of 2: a, c, d ──▶ rendezvous (`group/join.py`)
    other ranks               answer: a, c
    a newcomer       waits: d     answer: d

Groups are numbered by generation. All keys are in rank 0's store, under the id of the run; members are listed by the
ids of their processes. A process that is not among the members waits, and is admitted by a later call: a process that
was suspended and wakes up late, a machine that returns, or a new machine.
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
ANSWER_S = 5.0  # timeout for survivors to answer a call
_MOST_FAILURES = 2
_NEWCOMERS_S = 1.0  # timeout for newcomers, which may have exited


class Running(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first entry that a newcomer reads: the run's id, and the version of its processes."""

    run: str
    penstock: str = __version__


class RollCall:
    """Roll calls on rank 0: waiting newcomers and surviving members.

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
        """Return the ids of newcomers that have requested admission."""
        count = self._store.add(_key(self._run, "waiting"), 0)
        for number in range(self._seen + 1, count + 1):
            key = _key(self._run, "waiting", str(number))
            if not self._store.check([key]):
                break  # the newcomer has incremented the counter but not written its id yet
            name = self._store.get(key).decode()
            self._seen = number
            if name not in self._waiting and self._failures[name] < _MOST_FAILURES:
                self._waiting.append(name)
        return list(self._waiting)

    def note_failure(self, names: Iterable[str]) -> None:
        """Record that a group with these newcomers failed to form; after the second failure they are not admitted."""
        self._failures.update(names)

    def call(
        self, generation: int, expected: Sequence[str], answer_s: float = ANSWER_S, *, admits: bool = True
    ) -> list[str]:
        """Call the group of this generation, and return its members: first the expected ones in order, then newcomers.

        Without `admits`, newcomers continue to wait.
        """
        newcomers = [name for name in self.waiting() if name not in expected] if admits else []
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
        if admits:  # newcomers that do not answer are dropped; if still alive, they request admission again
            self._waiting = []
        members = [name for name in (*expected, *newcomers) if name in there]
        self._store.set(_key(self._run, "members", str(generation)), msgspec.json.encode(members).decode())
        return members

    def end(self) -> None:
        """Announce that no further group follows; no call is possible afterwards."""
        if not self._over:
            self._over = True
            self._store.set(_key(self._run, "call"), _OVER)
            close_store(self._store)

    def _answered(self, generation: int, name: str) -> bool:
        return self._store.check([_key(self._run, "answer", str(generation), name)])


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous point of a run, as seen by one process: rank 0's store at `host` and `port`.

    `links` make the connections, `address` is this process's listening address, `name` its display name.
    """

    links: Links
    connect: Callable[[], Store]
    host: str
    port: int
    address: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A process's identity and rendezvous, kept across regroups, and the members of its current group.

    `members` are the ids of this group's processes by rank, and `own` is this process's id; a process keeps its id
    from group to group. `generation` is the number of the group. `roll` is set on rank 0 only.
    """

    rendezvous: Rendezvous
    run: str
    own: str
    members: tuple[str, ...]
    generation: int = 0
    silence_s: float = SILENCE_S  # maximum silence of a process
    roll: RollCall | None = None


def await_call(
    store: PatientStore, run: str, name: str, after: int, *, waits: bool = True
) -> tuple[int, list[str]] | None:
    """Answer calls until the process of id `name` is a member of a group; return its generation and members.

    Only generations beyond `after` count. Returns None once the run is over, or, without `waits`, once a group has
    formed without this process. Raises `RuntimeError` if rank 0 has exited or is silent.
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
                wait_for_admission(store, run, name)
        time.sleep(_POLL_S)


def wait_for_admission(store: PatientStore, run: str, name: str) -> None:
    """Add a process, by its id, to the list of waiting newcomers."""
    number = store.call(lambda s: s.add(_key(run, "waiting"), 1))
    store.call(lambda s: s.set(_key(run, "waiting", str(number)), name))


def read_run(store: PatientStore, where: str) -> tuple[str, int]:
    """Return the id of a store's run and the generation of its group; raises `RunError` if there is none."""
    text = store.call(lambda s: read_if_there(s, _RUN_KEY))
    if text is None:
        raise RunError(f"the run at {where} admits no newcomers; start it with --on-loss continue or --on-loss wait")
    try:
        running = msgspec.json.decode(text, type=Running)
    except (msgspec.MsgspecError, UnicodeError):
        raise RunError(f"the run at {where} uses another version of penstock; install {__version__} there") from None
    if running.penstock != __version__:
        raise RunError(
            f"processes of a run must match, but penstock is {running.penstock} at {where} and {__version__} here; "
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
