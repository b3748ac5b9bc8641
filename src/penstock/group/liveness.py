"""Liveness: the first process looks after all others, and every other one after the first.

Each process has a board (`group/board.py`) that answers for it while it is alive, however busy; the others ask it,
over connections of their own, so a stopped process or a cut cable is noticed also while no data flows. There is one
verdict per group, the first one that stands on the first process's board.

    every process, each BEAT_S:    writes on its own board how far it is
    rank 0 reads every board, the others that of rank 0; each question has a thread, which may wait for ever
    no answer for SILENCE_S, or the connection breaks:   verdict
    a verdict on the board of rank 0:   abort all transports; waits end, and `failure` says why
    whoever leaves writes so on the boards of those that it looks after, who look after it
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from penstock.errors import DeviceLost, OutOfMemory, RunError
from penstock.group.board import lookup_s
from penstock.group.verdict import MAX_MESSAGE, VERDICT_KEY, Verdict, beat_key, gone_key, read_verdict, write_verdict
from penstock.memory import is_out_of_memory
from penstock.transport.base import FEEDER, SILENCE_S

BEAT_S = 0.5
WATCHFUL_S = 3.0  # where taking a process that is only slow for lost costs little: it comes back
_FIRST_BEAT = 6  # times the silence, where beats must be seen: processes that have only just met
_LAST_WORD_S = 1.0  # after a connection broke: in which whoever ended says why, or its parent does
_LOOKUP_S = 60.0  # until which a name server is waited for
_GRACE_S = 0.05
_TELL_S = 2.0  # in which another board takes what it is told


@dataclass(frozen=True)
class Boards:
    """This process's own board, and how to reach those of the processes that it looks after.

    A board that all processes share says nothing of one of them by answering: there beats must change. `addresses`
    are those of the others, whose names torch looks up when it connects, which takes up to `connect_s`.
    """

    own: Store
    others: Mapping[int, Callable[[], Store]]
    addresses: Mapping[int, str] = field(default_factory=dict)
    connect_s: float = 7.5  # longer than one question that a name server leaves open
    shared: bool = False

    @classmethod
    def of_threads(cls, store: Store, rank: int, size: int) -> "Boards":
        """Return the boards of a process's threads that play ranks: one store for all of them."""
        watched = [other for other in range(size) if other != rank and FEEDER in (rank, other)]
        return cls(store, dict.fromkeys(watched, lambda: store), shared=True)


@dataclass
class _Peer:
    """What is known of another process, by the thread that asks its board."""

    rank: int
    connect: Callable[[], Store]
    answered_s: float
    connect_s: float | None = None  # what connecting may take, as long as it lasts
    store: Store | None = None
    beat: str = ""
    verdict: str = ""
    broken_s: float | None = None
    left: bool = False
    ended: bool = False  # nobody asks it any more
    tell: list[tuple[str, str]] = field(default_factory=list)
    told: threading.Event = field(default_factory=threading.Event)
    awake: threading.Event = field(default_factory=threading.Event)


class Health:
    """Watches over one group of processes from one of them.

    `names` says for every rank what people call it, as in `stage 2 on host3`. `on_failure` is called
    once, from the watching thread. `why_ended` says of a rank how its process ended, where that is known here.

    Example:
        health = Health(boards, rank=0, names=["feeder", "stage 0"], on_failure=transport.abort)
    """

    def __init__(
        self, boards: Boards, rank: int, names: list[str], on_failure: Callable[[], None], *,
        silence_s: float = SILENCE_S, beat_s: float = BEAT_S,
    ) -> None:  # fmt: skip
        self._boards = boards
        self._rank = rank
        self._names = names
        self._on_failure = on_failure
        self._silence_s = silence_s
        self.beat_s = beat_s
        self.call = ""  # what this process calls, where it trains
        self.status: Callable[[], str] = str  # what this process says of itself with every beat; nothing
        self.why_ended: Callable[[int], str | None] = lambda _rank: None
        self.failure: Verdict | None = None
        self._stop, self._wake = threading.Event(), threading.Event()
        self._failing = threading.Lock()
        self._closed = False
        now = time.monotonic()
        self._peers = {other: _Peer(other, connect, now) for other, connect in boards.others.items()}
        self._threads = [
            threading.Thread(target=self._ask, args=(peer,), name=f"penstock-ask-{peer.rank}", daemon=True)
            for peer in self._peers.values()
        ]
        self._thread = threading.Thread(target=self._watch, name="penstock-health", daemon=True)
        for thread in (*self._threads, self._thread):
            thread.start()

    def call_instead(self, on_failure: Callable[[], None]) -> None:
        """Call something else on a failure, at once if there was one already."""
        self._on_failure = on_failure
        if self.failure is not None:
            on_failure()

    def report(self, error: BaseException, *, again: bool = False, lost: bool = False) -> None:
        """Report to everybody that this process failed; only the first report of a group counts.

        With `again` another group follows, of those that are left. With `lost` it follows without this process, whose
        own mistake the error is.
        """
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        memory = is_out_of_memory(error)
        message = f"{self._names[self._rank]}: {text}"
        self.announce(Verdict(rank=self._rank, message=message, lost=lost, memory=memory, again=again))

    def statuses(self) -> list[str]:
        """Return what this process says of itself, and what those that it looks after said last."""
        return [self.status(), *(peer.beat.partition(" ")[2] for peer in self._peers.values())]

    @property
    def watching(self) -> bool:
        """Return whether a verdict may still come."""
        return self.failure is None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what happened to the group, if anything did."""
        if self.failure is not None:
            kind = OutOfMemory if self.failure.memory else DeviceLost if self.failure.lost else RunError
            raise kind(self.failure.message)

    def wait_for_failure(self, timeout_s: float) -> None:
        """After a broken connection: wait a little for the reason, then raise it if there is one."""
        self.wait_for_verdict(timeout_s)
        self.check()

    def wait_for_verdict(self, timeout_s: float) -> None:
        """Wait a little for a verdict that may be on its way."""
        deadline = time.monotonic() + timeout_s
        while self.watching and time.monotonic() < deadline:
            time.sleep(0.02)

    def announce(self, verdict: Verdict) -> None:
        """Make this the verdict of the group, unless there is one already; ends every wait."""
        if self.failure is not None:
            return  # whoever would have to be told may be gone, and waited for
        verdict = msgspec.structs.replace(verdict, message=verdict.message[:MAX_MESSAGE])
        text = write_verdict(verdict)
        if self._rank == FEEDER or self._boards.shared:
            with contextlib.suppress(RuntimeError):  # the board is gone: this process goes by what it knows itself
                self._boards.own.compare_set(VERDICT_KEY, "", text)
                verdict = read_verdict(self._boards.own.get(VERDICT_KEY).decode())
        elif (first := self._peers.get(FEEDER)) is not None and first.rank != verdict.rank:
            self._tell([first], VERDICT_KEY, text)
            verdict = read_verdict(first.verdict) if first.verdict else verdict
        self._fail(verdict)

    def close(self) -> None:
        """Stop watching; those who look after this process are told that its silence is meant."""
        if self._closed:
            return
        self._closed = True
        # an end that is not announced would be a verdict, and hide the one that there is
        if self.failure is None:
            self._tell(list(self._peers.values()), gone_key(self._rank), "gone")
            if self._peers and not self._boards.shared:
                time.sleep(_GRACE_S)  # a question that was on its way is answered yet
        elif self._rank == FEEDER and not self._boards.shared:
            self._tell(list(self._peers.values()), VERDICT_KEY, write_verdict(self.failure))
        self._stop.set()
        self._wake.set()
        for peer in self._peers.values():
            peer.awake.set()
        self._thread.join()
        for thread in self._threads:
            thread.join(_TELL_S / len(self._threads))  # one that waits for an answer is left to its end
        own, self._boards = self._boards.own, Boards(HashStore(), {})  # what was served is served no more
        if hasattr(own, "close"):
            own.close()

    def _tell(self, peers: list[_Peer], key: str, value: str) -> None:
        """Have the threads that ask boards write on them, those that answer."""
        # also those silent for a while, as this process may have stood still; not those that ask no more
        asked = [peer for peer in peers if peer.broken_s is None]
        for peer in asked:
            peer.told.clear()
            peer.tell.append((key, value))
            peer.awake.set()
        deadline = time.monotonic() + _TELL_S
        for peer in asked:
            while not peer.ended and not peer.told.wait(_GRACE_S) and time.monotonic() < deadline:
                pass

    def _watch(self) -> None:
        """Look at what is known of the others, each beat; whatever goes wrong here is a verdict too."""
        seen_s = time.monotonic()
        beat = 0
        try:
            while not self._stop.is_set() and self.failure is None:
                beat += 1
                with contextlib.suppress(RuntimeError):  # the server went first: this process is ending
                    self._boards.own.set(beat_key(self._rank), f"{beat} {self.status()}")
                now = time.monotonic()
                if now - seen_s > 2 * self.beat_s + 0.5:  # this process itself stood still: nobody else did
                    for peer in self._peers.values():
                        peer.answered_s = max(peer.answered_s, now - self.beat_s)
                seen_s = now
                self._look(now)
                self._wake.wait(min(self.beat_s, max(_GRACE_S, self._soonest(now) - time.monotonic())))
                self._wake.clear()
        except Exception as error:
            name = self._names[self._rank]
            self.announce(Verdict(rank=self._rank, message=f"{name}: watching over it failed: {error}", lost=False))

    def _look(self, now: float) -> None:
        text = self._boards.own.get(VERDICT_KEY).decode() if self._boards.own.check([VERDICT_KEY]) else ""
        if text:
            self._fail(read_verdict(text))
            return
        for peer in self._peers.values():
            if peer.left:
                continue
            # a secured store knows of a connection that stands while its question is not answered yet
            silence_s = now - max(peer.answered_s, getattr(peer.store, "heard_s", 0.0))
            patience_s = self._silence_s * (_FIRST_BEAT if self._boards.shared and not peer.beat else 1)
            patience_s = max(patience_s, peer.connect_s or 0.0)
            broken = peer.broken_s is not None and now > self._last_word_at(peer.broken_s, peer.answered_s)
            if peer.verdict:
                self._fail(read_verdict(peer.verdict))
                return
            if (broken or silence_s > patience_s) and not self._has_left(peer):
                self.announce(self._verdict_on(peer, silence_s))
                return

    def _soonest(self, now: float) -> float:
        """Return when there may next be something to say of a process that is silent or whose connection broke."""
        waited = [peer for peer in self._peers.values() if not peer.left]
        broken = [self._last_word_at(peer.broken_s, peer.answered_s) for peer in waited if peer.broken_s is not None]
        silent = [peer.answered_s + self._silence_s for peer in waited if peer.connect_s is None]
        return min([at_s for at_s in (*broken, *silent) if at_s > now], default=float("inf"))

    def _last_word_at(self, broken_s: float, answered_s: float) -> float:
        """Return until when a process whose connection broke may have its last word: not one that had been silent."""
        return min(broken_s + min(_LAST_WORD_S, self._silence_s), max(broken_s, answered_s + self._silence_s))

    def _has_left(self, peer: _Peer) -> bool:
        peer.left = self._boards.own.check([gone_key(peer.rank)])
        return peer.left

    def _verdict_on(self, peer: _Peer, silence_s: float) -> Verdict:
        name, why = self._names[peer.rank], self.why_ended(peer.rank)
        if why is not None:
            message = f"{name} {why}"
        elif peer.broken_s is not None:
            message = f"{name} is gone: its process has ended, or its machine has"
        else:
            message = f"{name} has not answered for {silence_s:.0f} s: it was stopped, cut off or is out of memory"
        return Verdict(rank=peer.rank, message=message, lost=True)

    def _ask(self, peer: _Peer) -> None:
        """Ask one other board again and again; what is known of the other process changes with its answers."""
        beat = beat_key(peer.rank)
        keys = [beat, VERDICT_KEY] if peer.rank == FEEDER and not self._boards.shared else [beat]
        try:
            store = peer.store = self._connect(peer)
            # who has left is asked no more: its board goes, and torch prints a trace where a connection breaks
            while (not self._stop.is_set() or peer.tell) and not self._has_left(peer):
                while peer.tell:
                    key, value = peer.tell.pop(0)
                    store.compare_set(key, "", value)
                    if key == VERDICT_KEY:
                        peer.verdict = store.get(VERDICT_KEY).decode()
                    peer.told.set()
                present = keys if not self._boards.shared or store.check([beat]) else []
                answers = [value.decode() for value in store.multi_get(present)] if present else []
                if not self._boards.shared or answers[:1] not in ([], [peer.beat]):
                    peer.answered_s = time.monotonic()
                peer.beat, *verdicts = answers or [peer.beat]
                peer.verdict = peer.verdict or next(iter(verdicts), "")
                peer.awake.wait(self.beat_s)
                peer.awake.clear()
        except RuntimeError:
            peer.broken_s = time.monotonic()
            self._wake.set()
        except Exception as error:  # as of an answer that is no text: then nobody would look after that process
            message = f"{self._names[peer.rank]} answers what cannot be read ({type(error).__name__}); start again"
            self._fail(Verdict(rank=peer.rank, message=message, lost=False))
        finally:
            peer.ended = True
            peer.told.set()

    def _connect(self, peer: _Peer) -> Store:
        """Connect, with a patience that knows how long looking up a name takes here."""
        if peer.rank in self._boards.addresses:
            peer.connect_s = _LOOKUP_S
            peer.connect_s = self._boards.connect_s + 3 * lookup_s(self._boards.addresses[peer.rank])
            peer.answered_s = time.monotonic()
        store = peer.connect()
        peer.answered_s, peer.connect_s = time.monotonic(), None
        return store

    def _fail(self, verdict: Verdict) -> None:
        with self._failing:
            if self.failure is not None:
                return
            self.failure = verdict
        self._on_failure()
