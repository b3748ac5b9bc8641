"""Boards, the heartbeat stores that other ranks poll, and store calls with a deadline.

Over plain links a C++ thread of torch, which never takes the GIL, serves the board: a process answers while it
computes, loads or imports for any length of time. Over ZeroMQ links (`group/zmq_store.py`) a Python thread serves it,
and libzmq's own heartbeats prove that the process lives. A stopped process does not answer, and a connection to an
exited one breaks. A call to a store of torch blocks for as long as the server is silent, whatever timeout the call has:
callers that must not wait that long make it on a separate thread.
"""

import contextlib
import datetime
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from penstock.errors import RunError
from penstock.group.addresses import listen, reach
from penstock.text import note
from penstock.transport.base import StoreSilent, run_watched
from penstock.wire import FEEDER

# timeout for a key to appear; the server enforces it, so it does not help if the server is silent
_TIMEOUT = datetime.timedelta(seconds=60)
# Torch resolves the peer's name for its log lines only. A name server that does not answer delays each connection by
# 5 s, or by 10 s with a second attempt.
CONNECT_S = 15.0
_POLL_S = 0.1
_KNOCK_S = 0.5
_TELL_S, _TELL_AGAIN_S = 5.0, 60.0  # of waiting for rank 0

T = TypeVar("T")


def serve_store(address: str, port: int = 0) -> TCPStore:
    """Serve a store on a single address; raises `OSError` as `listen` does."""
    listener = listen(address, port)
    port = int(listener.getsockname()[1])
    return TCPStore(address, port, None, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(address: str, port: int, timeout: datetime.timedelta = _TIMEOUT) -> TCPStore:
    """Connect to a store; raises `RuntimeError` if the port is closed."""
    return TCPStore(address, port, None, False, timeout, wait_for_workers=False)


def connect_board(address: str, port: int, timeout: datetime.timedelta = _TIMEOUT) -> TCPStore:
    """Connect to a store that is already listening; raises `RuntimeError` immediately if its process has exited.

    Torch alone would retry for its whole timeout, even if the process exits while connecting.
    """

    def knock() -> None:
        try:
            reach(address, port, 5.0)
        except OSError as error:
            raise RuntimeError(str(error)) from None

    knock()
    return run_watched(
        lambda: connect_store(address, port, timeout), knock, timeout.total_seconds() + CONNECT_S, poll_s=_KNOCK_S
    )


def lookup_s(address: str) -> float:
    """Measure how long this machine takes to look up the name of an address, which torch does when it connects."""
    begin_s = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo((address, 9), 0)
    return time.monotonic() - begin_s


def nobody_listens(address: str, port: int) -> bool:
    """Return whether a machine refuses connections to a port; False if it does not answer."""
    try:
        reach(address, port, 5.0)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def wait_for_server(address: str, port: int, timeout_s: float, *, tell_s: float = _TELL_S) -> None:
    """Wait until the rendezvous, of rank 0 or of torchrun's agent, listens on its port.

    Raises `RunError` after the timeout.
    """
    deadline, next_s = time.monotonic() + timeout_s, time.monotonic() + tell_s
    while True:
        try:
            reach(address, port, 5.0)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"the rendezvous at {address}:{port} cannot be reached: {error}; start rank 0 first"
                ) from None
            if time.monotonic() > next_s:
                note(f"waiting for rank 0 at {address}:{port} (MASTER_ADDR and MASTER_PORT): {error}")
                next_s = time.monotonic() + _TELL_AGAIN_S
            time.sleep(_POLL_S)


def read_if_there(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if it is not set; torch's `get` would wait until it is."""
    return store.get(key) if store.check([key]) else None


class PatientStore:
    """A client of another process's store with a deadline for each call, made on a separate thread.

    Example:
        store = PatientStore(lambda: connect_store("192.168.1.10", 29500), deadline_s=10.0)
        store.call(lambda s: s.set("joined/1", "1"))

    After a call that was not answered in time, every further call raises `StoreSilent` immediately. Errors of the call
    and of `connect` propagate.
    """

    def __init__(self, connect: Callable[[], Store], deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._calls: queue.SimpleQueue[tuple[Callable[[Store], Any], queue.SimpleQueue[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._silent = self._connected = False
        self._thread = threading.Thread(target=self._work, args=(connect,), name="penstock-store", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Store], T]) -> T:
        """Call a function with the store and return its result."""
        reply: queue.SimpleQueue[Any] = queue.SimpleQueue()
        deadline_s = self._deadline_s if self._connected else self._deadline_s + CONNECT_S
        if self._silent:
            raise StoreSilent("the store does not answer")
        self._calls.put((function, reply))
        try:
            result, error = reply.get(timeout=deadline_s)
        except queue.Empty:
            self._silent = True
            raise StoreSilent(f"the store has not answered for {deadline_s:g} s") from None
        if error is not None:
            raise error
        found: T = result
        return found

    def close(self) -> None:
        """Close the connection; a thread that still waits for an answer is not joined."""
        self._calls.put(None)
        if not self._silent:
            self._thread.join(self._deadline_s)

    def _work(self, connect: Callable[[], Store]) -> None:
        store: Store | None = None
        problem: BaseException | None = None
        try:
            store = connect()
            self._connected = True
        except BaseException as error:
            problem = error
        while (task := self._calls.get()) is not None:
            function, reply = task
            if store is None:
                reply.put((None, problem))
                continue
            try:
                reply.put((function(store), None))
            except BaseException as error:
                reply.put((None, error))


VERDICT_KEY = "verdict"
MAX_MESSAGE = 2000  # characters of a verdict


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The failure that ended a group: the rank that failed, and a message for people."""

    rank: int
    message: str
    lost: bool
    memory: bool = False  # it ran out of memory
    again: bool = False  # the run forms another group, of all ranks that answer and the waiting newcomers


def prepare_board(board: Store, rank: int) -> None:
    """Write the initial entries of a new board, for ranks that poll it before the first beat."""
    board.set(beat_key(rank), "")
    if rank == FEEDER:
        board.set(VERDICT_KEY, "")


def beat_key(rank: int) -> str:
    """Return the key of a rank's beat on a board."""
    return f"beat/{rank}"


def gone_key(rank: int) -> str:
    """Return the key of a rank's exit on a board."""
    return f"gone/{rank}"


def write_verdict(verdict: Verdict) -> str:
    """Encode a verdict for `read_verdict`."""
    return msgspec.json.encode(verdict).decode()


def read_verdict(text: str) -> Verdict:
    """Decode a verdict of another process; if that fails, return a verdict that states the problem."""
    try:
        verdict = msgspec.json.decode(text, type=Verdict)
    except (msgspec.MsgspecError, UnicodeError):
        message = (
            "the failure report cannot be read, as processes run different versions of penstock; install the same one "
            "everywhere"
        )
        return Verdict(rank=FEEDER, message=message, lost=False)
    line = (verdict.message.splitlines() or [""])[0]
    return msgspec.structs.replace(verdict, message=line[:MAX_MESSAGE])
