"""A transport over ZeroMQ connections, authenticated by a key or by access to a private folder.

Each process has one listening socket and connects to every other process. A message waits at its sender until the
receiver has posted a buffer and sent a credit for it: messages in flight are bounded, and a send is done when a receive
is posted. Longer messages need a credit for each stretch, so that each side holds only one in addition to the buffers.

    receiver   receive(buffer, source, tag) ── credit, tag ──▶ sender
    sender     send(buffer, to, tag)        ── data, tag, parts ──▶ receiver, into the buffer
"""

import hashlib
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol

import zmq
from torch import Tensor

from penstock.errors import ConnectionBroken, RunError, TransportError
from penstock.transport.base import Pending
from penstock.transport.connections import Connection, Connections

_HEADER = struct.Struct("<Bq")
_CREDIT, _DATA, _MORE = 1, 2, 3  # more: of a message that goes on
_STRETCH_BYTES = 32 * 2**20
_POLL_MS = 100
_LOOK_S = 0.2
_NAME = struct.Struct(">cI16s")  # identity of a connection: its rank and group


class Addresses(Protocol):
    """A store through which the ranks exchange their addresses."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read the value of a key that is set."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys are set."""


class ZmqTransport:
    """Point-to-point messages between authenticated processes.

    `group` is the group's unique name; messages of other groups are ignored. Connecting takes at most `join_s`
    seconds, during which `watch` is called and may raise sooner. Raises `RunError` if the ranks cannot reach
    each other.

    Example:
        ZmqTransport(Curve(key), store, rank=0, size=2, address="192.168.1.10")
    """

    def __init__(
        self, connections: Connections, store: Addresses, rank: int, size: int, address: str, *, join_s: float = 60.0,
        group: str = "", watch: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, size
        self._group = hashlib.blake2b(group.encode(), digest_size=16).digest()
        self._lock = threading.RLock()
        self._receives: dict[tuple[int, int], deque[_Pending]] = defaultdict(deque)
        self._sends: dict[tuple[int, int], deque[_Pending]] = defaultdict(deque)
        self._credits: dict[tuple[int, int], int] = defaultdict(int)
        self._open: set[_Pending] = set()
        self._failure: str | None = None
        self._broken: set[int] = set()
        self._others: dict[int, Connection] = {}
        self._part_bytes = connections.part_bytes
        self._inbox, port = connections.listen(address, peers=size - 1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._take_in, name="penstock-zmq", daemon=True)
        self._thread.start()
        try:
            store.set(f"data/{rank}", f"{address} {port}")
            self._connect(connections, store, time.monotonic() + join_s, watch)
        except BaseException:
            self.close()
            raise

    def _connect(self, connections: Connections, store: Addresses, deadline: float, watch: Callable[[], None]) -> None:
        for peer in (rank for rank in range(self.size) if rank != self.rank):
            while not store.check([f"data/{peer}"]):
                watch()
                if time.monotonic() > deadline:
                    raise RunError(
                        f"rank {peer} has not published its address; check that every host reaches the first"
                    )
                time.sleep(0.02)
            host, port = store.get(f"data/{peer}").decode().split()
            try:
                self._others[peer] = connections.connect(
                    host, int(port), _NAME.pack(b"r", self.rank, self._group), max(1.0, deadline - time.monotonic())
                )
            except RuntimeError as error:
                watch()
                raise RunError(
                    f"the {self.size} processes met but rank {self.rank} cannot connect to rank {peer}: {error}; "
                    "check that every host reaches every other"
                ) from None

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer without waiting."""
        pending = _Pending(buffer, to)
        with self._lock:
            self._check(to)
            self._open.add(pending)
            queued = self._sends[to, tag]
            queued.append(pending)
            self._send_what_may_go(to, tag, queued)
        return pending

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for the next message on a tag."""
        pending = _Pending(buffer, source)
        with self._lock:
            self._check(source)
            self._open.add(pending)
            self._receives[source, tag].append(pending)
            self._put(source, [_HEADER.pack(_CREDIT, tag)])
        return pending

    def abort(self) -> None:
        """Make all waits of this process raise `ConnectionBroken`."""
        self._fail("was aborted")

    def close(self) -> None:
        """Close all connections."""
        self._fail("was aborted")
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            for connection in self._others.values():
                connection.close()
            self._others = {}

    def _check(self, peer: int) -> None:
        if self._failure is not None or peer in self._broken:
            raise ConnectionBroken(f"the connection to rank {peer} {self._failure or 'broke'}")

    def _fail(self, reason: str) -> None:
        """Fail all current and later operations with any rank."""
        with self._lock:
            self._failure = self._failure or reason
        for peer in range(self.size):
            self._break(peer, reason)

    def _break(self, peer: int, reason: str = "broke") -> None:
        """Fail all current and later operations with one rank."""
        with self._lock:
            self._broken.add(peer)
            failed = [pending for pending in self._open if pending.peer == peer]
            self._open.difference_update(failed)
            for waiting in (self._sends, self._receives):
                for key in [key for key in waiting if key[0] == peer]:
                    del waiting[key]
        for pending in failed:
            pending.finish(ConnectionBroken(f"the connection to rank {peer} {reason}"))

    def _look_after_connections(self) -> None:
        """Break with peers whose connection was broken at the last look, too: what they sent has arrived since then."""
        for peer, connection in list(self._others.items()):
            if peer not in self._broken:
                if connection.broken:
                    self._break(peer)
                connection.look()

    def _send_what_may_go(self, to: int, tag: int, queued: "deque[_Pending]") -> None:
        """Send, under the lock, as many messages as credits allow."""
        while queued and self._credits[to, tag]:
            self._credits[to, tag] -= 1
            pending, most = queued[0], self._part_bytes
            data = memoryview(pending.buffer.numpy())[pending.done :]  # type: ignore[arg-type]
            goes_on = len(data) > _STRETCH_BYTES
            parts = [data[at : at + most] for at in range(0, min(len(data), _STRETCH_BYTES), most)]
            pending.done += sum(map(len, parts))
            if not self._put(to, [_HEADER.pack(_MORE if goes_on else _DATA, tag), *parts]):
                return
            if not goes_on:
                queued.popleft()
                self._open.discard(pending)
                pending.finish()

    def _put(self, to: int, parts: "list[bytes | memoryview]") -> bool:
        """Pass a message to libzmq, under the lock; if the connection is lost, fail the operations that use it."""
        try:
            self._others[to].socket.send_multipart(parts, copy=True)
        except (zmq.ZMQError, KeyError):
            self._break(to)
            return False
        return True

    def _take_in(self) -> None:
        """Receive messages, on a separate thread."""
        try:
            self._inbox.setsockopt(zmq.RCVTIMEO, _POLL_MS)
            looked_s = time.monotonic()
            while not self._closing.is_set():
                if time.monotonic() - looked_s > _LOOK_S and not self._inbox.poll(0):
                    looked_s = time.monotonic()
                    self._look_after_connections()
                try:
                    name = self._inbox.recv()
                except zmq.Again:
                    continue
                try:
                    self._take(name, self._inbox.recv() if self._inbox.rcvmore else b"")
                finally:
                    self._receive_into(memoryview(bytearray()))  # the rest of a message that was not taken
        except TransportError as error:
            self._fail(f"is damaged: {error}")
        except (zmq.ZMQError, struct.error, ValueError) as error:
            self._fail(f"broke: {error}")
        finally:
            self._inbox.close(0)

    def _take(self, name: bytes, header: bytes) -> None:
        kind, source, group = _NAME.unpack(name)
        if group != self._group:  # from an earlier group, or another run with the same key
            return
        action, tag = _HEADER.unpack(header)
        if kind != b"r" or not 0 <= source < self.size or source == self.rank:
            raise TransportError(f"a process named {name!r} does not belong to this run of {self.size}")
        if action == _CREDIT:
            with self._lock:
                self._credits[source, tag] += 1
                self._send_what_may_go(source, tag, self._sends[source, tag])
            return
        with self._lock:
            waiting = self._receives.get((source, tag))
            if action not in {_DATA, _MORE} or not waiting:
                if self._failure is not None:
                    return
                raise TransportError(f"rank {source} sent a message without a posted receive")
            pending = waiting[0]
            if action == _DATA:
                waiting.popleft()
                self._open.discard(pending)
        pending.done += self._receive_into(memoryview(pending.buffer.numpy())[pending.done :])  # type: ignore[arg-type]
        if action == _MORE:
            with self._lock:
                self._put(source, [_HEADER.pack(_CREDIT, tag)])
            return
        too_long = pending.done > pending.buffer.numel()
        text = f"a message of {pending.done} bytes does not fit the posted buffer of {pending.buffer.numel()}"
        pending.finish(TransportError(text) if too_long else None)

    def _receive_into(self, room: memoryview) -> int:
        """Write the further parts of a message into a buffer, as far as they fit; returns their length."""
        num_bytes = 0
        while self._inbox.rcvmore:
            num_bytes += self._inbox.recv_into(room[num_bytes:])
        return num_bytes


class _Pending:
    """A send or receive in flight."""

    def __init__(self, buffer: Tensor, peer: int) -> None:
        self.buffer, self.peer = buffer, peer
        self.done = 0  # bytes sent or received
        self._done = threading.Lock()
        self._done.acquire()
        self._error: TransportError | None = None

    def finish(self, error: TransportError | None = None) -> None:
        """Mark the operation as done, or as failed if there is an error."""
        self._error = error
        self._done.release()

    def wait(self) -> None:
        """Block until it is done."""
        with self._done:
            if self._error is not None:
                raise self._error

    def is_done(self) -> bool:
        """Return whether it is done."""
        return not self._done.locked()
