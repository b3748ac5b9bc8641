"""Liveness: rank 0, the driver, watches all other ranks, and each of them watches rank 0.

Each process has a board (`group/board.py`) that answers for it while it is alive, however busy; its watchers poll it
over separate connections, so a stopped process or a cut cable is detected even without traffic. A group has one
verdict, the first one written on rank 0's board.

    every process, each BEAT_S:    writes its progress on its board
    rank 0 reads every board, the other ranks read rank 0's; each board has a polling thread, which may block forever
    no answer for the group's silence limit (SILENCE_S by default), or the connection breaks:   verdict
    a verdict on the board of rank 0:   abort all transports; waits end, and `failure` has the reason
    a process that exits cleanly announces its exit on the boards of the ranks that it watches
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from penstock.errors import DeviceLost, OutOfMemory, PenstockError, RunError
from penstock.group.board import (
    MAX_MESSAGE,
    VERDICT_KEY,
    Verdict,
    beat_key,
    gone_key,
    lookup_s,
    read_verdict,
    write_verdict,
)
from penstock.resources import is_out_of_memory
from penstock.transport.base import SILENCE_S
from penstock.wire import FEEDER

BEAT_S = 0.5
WATCHFUL_S = 3.0  # maximum silence if a false alarm costs little: the process joins again
_FIRST_BEAT = 6  # on a shared board, the first beat may take this many times the silence limit
_REASON_S = 1.0  # after a connection breaks: timeout for the exited process or its parent to report the reason
_LOOKUP_S = 60.0  # timeout for a name server
_GRACE_S = 0.05
_TELL_S = 2.0  # timeout for writing to another board


@dataclass(frozen=True)
class Boards:
    """The board of this process, and connections to the boards of the processes that it watches.

    If all processes share one board, its answer does not prove that a given process is alive: that process's beat must
    change. Torch looks up the names of the other processes' `addresses` when it connects; the timeout for connecting is
    `connect_s` plus three times a measured lookup.
    """

    own: Store
    others: Mapping[int, Callable[[], Store]]
    addresses: Mapping[int, str] = field(default_factory=dict)
    connect_s: float = 7.5  # longer than one unanswered query to a name server
    shared: bool = False

    @classmethod
    def of_threads(cls, store: Store, rank: int, size: int) -> "Boards":
        """Return the boards of threads that act as ranks of one process: one store for all of them."""
        watched = [other for other in range(size) if other != rank and FEEDER in (rank, other)]
        return cls(store, dict.fromkeys(watched, lambda: store), shared=True)


@dataclass
class _Peer:
    """State of another process, updated by the thread that polls its board."""

    rank: int
    connect: Callable[[], Store]
    answered_s: float
    connect_s: float | None = None  # timeout for connecting; None once connected
    store: Store | None = None
    beat: str = ""
    verdict: str = ""
    broken_s: float | None = None
    left: bool = False
    ended: bool = False  # no longer polled
    tell: list[tuple[str, str]] = field(default_factory=list)
    told: threading.Event = field(default_factory=threading.Event)
    awake: threading.Event = field(default_factory=threading.Event)


class Health:
    """Health of one process group, watched from one rank.

    `names` are the display names of all ranks, such as `rank 2 on host2`. `on_failure` is called once, when the group
    fails, from the thread that detects or reports the failure. `why_ended` returns how a rank's process ended, if this
    process started it.

    Example:
        health = Health(boards, rank=0, names=["the driver", "worker 1"], on_failure=transport.abort)
    """

    def __init__(
        self,
        boards: Boards,
        rank: int,
        names: list[str],
        on_failure: Callable[[], None],
        *,
        silence_s: float = SILENCE_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self._boards = boards
        self._rank = rank
        self._names = names
        self._on_failure = [on_failure]
        self._silence_s = silence_s
        self.beat_s = beat_s
        self.call = ""  # the current call of a training run
        self.status: Callable[[], str] = str  # returns the status sent with every beat; default: empty
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

    def when_failed(self, call: Callable[[], None]) -> None:
        """Call this too when the group fails; if it has already failed, immediately, from this thread."""
        with self._failing:
            if self.failure is None:
                self._on_failure.append(call)
                return
        call()

    def report(self, error: BaseException, *, again: bool = False, lost: bool = False) -> None:
        """Report to all ranks that this process failed; only the first report of a group counts.

        With `again` the run forms another group, of all ranks that answer. With `lost` the run forms another group
        without this process, which caused the error.
        """
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, SystemExit):
            text = f"SystemExit: {text}"
        memory = is_out_of_memory(error)
        message = f"{self._names[self._rank]}: {text}"
        self.announce(Verdict(rank=self._rank, message=message, lost=lost, memory=memory, again=again))

    def statuses(self) -> list[str]:
        """Return the status of this process, and the last status of each process that it watches."""
        return [self.status(), *(peer.beat.partition(" ")[2] for peer in self._peers.values())]

    @property
    def watching(self) -> bool:
        """True while a verdict can still arrive."""
        return self.failure is None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the failure of the group, if any."""
        if self.failure is not None:
            kind = OutOfMemory if self.failure.memory else DeviceLost if self.failure.lost else RunError
            raise kind(self.failure.message)

    def wait_for_failure(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the reason of a broken connection, then raise it if known."""
        self.wait_for_verdict(timeout_s)
        self.check()

    def wait_for_verdict(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a verdict that may be in flight."""
        deadline = time.monotonic() + timeout_s
        while self.watching and time.monotonic() < deadline:
            time.sleep(0.02)

    def announce(self, verdict: Verdict) -> None:
        """Make this the verdict of the group unless the group already has one; ends every wait."""
        if self.failure is not None:
            return  # notifying again would wait for ranks that may have exited
        verdict = msgspec.structs.replace(verdict, message=verdict.message[:MAX_MESSAGE])
        text = write_verdict(verdict)
        if self._rank == FEEDER or self._boards.shared:
            with contextlib.suppress(RuntimeError):  # the board is closed: use the local verdict
                self._boards.own.compare_set(VERDICT_KEY, "", text)
                verdict = read_verdict(self._boards.own.get(VERDICT_KEY).decode())
        elif (first := self._peers.get(FEEDER)) is not None and first.rank != verdict.rank:
            self._tell([first], VERDICT_KEY, text)
            verdict = read_verdict(first.verdict) if first.verdict else verdict
        self._fail(verdict)

    def close(self) -> None:
        """Stop watching, and announce this exit to the processes that watch this one."""
        if self._closed:
            return
        self._closed = True
        # without this, the watchers would take the exit for a lost process
        if self.failure is None:
            self._tell(list(self._peers.values()), gone_key(self._rank), "gone")
            if self._peers and not self._boards.shared:
                time.sleep(_GRACE_S)  # a query in flight is still answered
        elif self._rank == FEEDER and not self._boards.shared:
            self._tell(list(self._peers.values()), VERDICT_KEY, write_verdict(self.failure))
        self._stop.set()
        self._wake.set()
        for peer in self._peers.values():
            peer.awake.set()
        self._thread.join()
        for thread in self._threads:
            thread.join(_TELL_S / len(self._threads))  # a thread that still waits for an answer is abandoned
        own, self._boards = self._boards.own, Boards(HashStore(), {})  # drop the served store
        if hasattr(own, "close"):
            own.close()

    def _tell(self, peers: list[_Peer], key: str, value: str) -> None:
        """Write a value on the boards of peers, through the threads that poll them."""
        # include silent peers, because this process may be the one that was stopped; skip peers whose connection broke
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
        """Check the state of all peers at each beat; an error here is a verdict too."""
        seen_s = time.monotonic()
        beat = 0
        try:
            while not self._stop.is_set() and self.failure is None:
                beat += 1
                with contextlib.suppress(RuntimeError):  # the server was closed first: this process is exiting
                    self._boards.own.set(beat_key(self._rank), f"{beat} {self.status()}")
                now = time.monotonic()
                if now - seen_s > 2 * self.beat_s + 0.5:  # this process was stopped, not its peers
                    for peer in self._peers.values():
                        peer.answered_s = max(peer.answered_s, now - self.beat_s)
                seen_s = now
                self._look(now)
                self._wake.wait(min(self.beat_s, max(_GRACE_S, self._soonest(now) - time.monotonic())))
                self._wake.clear()
        except Exception as error:
            name = self._names[self._rank]
            self.announce(Verdict(rank=self._rank, message=f"{name}: its liveness watch failed: {error}", lost=False))

    def _look(self, now: float) -> None:
        text = self._boards.own.get(VERDICT_KEY).decode() if self._boards.own.check([VERDICT_KEY]) else ""
        if text:
            self._fail(read_verdict(text))
            return
        for peer in self._peers.values():
            if peer.left:
                continue
            # a ZeroMQ store detects that a connection is alive even before its request is answered
            silence_s = now - max(peer.answered_s, getattr(peer.store, "heard_s", 0.0))
            patience_s = self._silence_s * (_FIRST_BEAT if self._boards.shared and not peer.beat else 1)
            patience_s = max(patience_s, peer.connect_s or 0.0)
            broken = peer.broken_s is not None and now > self._reason_deadline(peer.broken_s, peer.answered_s)
            if peer.verdict:
                self._fail(read_verdict(peer.verdict))
                return
            if (broken or silence_s > patience_s) and not self._has_left(peer):
                self.announce(self._verdict_on(peer, silence_s))
                return

    def _soonest(self, now: float) -> float:
        """Return the next time at which a silent or disconnected process may be declared lost."""
        waited = [peer for peer in self._peers.values() if not peer.left]
        broken = [self._reason_deadline(peer.broken_s, peer.answered_s) for peer in waited if peer.broken_s is not None]
        silent = [peer.answered_s + self._silence_s for peer in waited if peer.connect_s is None]
        return min([at_s for at_s in (*broken, *silent) if at_s > now], default=float("inf"))

    def _reason_deadline(self, broken_s: float, answered_s: float) -> float:
        """Return the time until which a disconnected process may still report a reason.

        If the process had already been silent for too long when the connection broke, that is the time of the break.
        """
        return min(broken_s + min(_REASON_S, self._silence_s), max(broken_s, answered_s + self._silence_s))

    def _has_left(self, peer: _Peer) -> bool:
        peer.left = self._boards.own.check([gone_key(peer.rank)])
        return peer.left

    def _verdict_on(self, peer: _Peer, silence_s: float) -> Verdict:
        name, why = self._names[peer.rank], self.why_ended(peer.rank)
        if why is not None:
            message = f"{name} {why}"
        elif peer.broken_s is not None:
            message = f"{name} is lost: its process or its machine has stopped"
        else:
            message = f"{name} has not answered for {silence_s:.0f} s: it was stopped, cut off or is out of memory"
        return Verdict(rank=peer.rank, message=message, lost=True)

    def _ask(self, peer: _Peer) -> None:
        """Poll the board of one peer until it leaves, and update the peer's state with each answer."""
        beat = beat_key(peer.rank)
        keys = [beat, VERDICT_KEY] if peer.rank == FEEDER and not self._boards.shared else [beat]
        try:
            store = peer.store = self._connect(peer)
            # a peer that has left is no longer polled: torch prints a trace when its board closes
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
        except PenstockError as error:  # of this process, such as too few files that it may open
            self._fail(Verdict(rank=self._rank, message=str(error), lost=False))
        except Exception as error:  # e.g. an answer that is not text: the thread would die and nobody watch the peer
            message = f"{self._names[peer.rank]} sent an undecodable answer ({type(error).__name__}); start again"
            self._fail(Verdict(rank=peer.rank, message=message, lost=False))
        finally:
            peer.ended = True
            peer.told.set()
            # close it here, not when this object is garbage-collected: a long run forms many groups and would leak
            # connections
            board, peer.store = peer.store, None
            if board is not None and hasattr(board, "close"):
                peer.answered_s = max(peer.answered_s, getattr(board, "heard_s", 0.0))
                board.close()

    def _connect(self, peer: _Peer) -> Store:
        """Connect, with a timeout that includes a measured name lookup."""
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
        for call in self._on_failure:
            call()
