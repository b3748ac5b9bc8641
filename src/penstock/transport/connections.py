"""ZeroMQ connections between the processes of a run, maintained by a libzmq thread.

They lead over TCP without a key, for a trusted network; over TCP with one, which the other side proves before anything
of it is read (`transport/curve.py`); or over sockets in a folder, between processes of one account on one machine.
"""

import errno
import os
import socket
import struct
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.errors import RunError
from penstock.transport.base import SILENCE_S
from penstock.transport.open_files import FULL, check_room, naming_limit, raise_file_limit, too_many_files

# keys are checked in Python: a process that is importing, or has a small share of a core, takes seconds to answer
CONNECT_S = 30.0
_ANSWER_BYTES = 4 * 2**20
# open files of a process with two connections, of one further socket, and of what a peer connects: board, store, inbox
_FIRST_FILES, _FILES, _ACCEPTED_FILES = 32, 8, 3
_AROUND_BYTES = 1024  # overhead of encryption per part
# libzmq's thread exchanges heartbeats with the other side, even while the interpreter's lock is held
_BEAT_MS = 1000
_OF_SILENCE = 0.8  # libzmq detects a silence before its callers do
_PROVED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_BROKEN = (
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_CLOSED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


class Connections:
    """Sockets of one process that accept only authenticated peers; a subclass defines how they authenticate.

    Example:
        listener, port = connections.listen("192.168.1.10")
        connection = connections.connect("192.168.1.10", port, b"1")
    """

    refused = "closes the connection"  # reason in the error for a connection that breaks before it is established
    part_bytes = 4 * 2**20  # maximum length of a message part to a listening socket
    again_s: Sequence[float] = ()  # pauses before each new attempt after the other side closed the connection

    def __init__(self) -> None:
        raise_file_limit()
        check_room(_FIRST_FILES)
        self._accepts = 0  # files that libzmq's thread may open at any time, without which it aborts the process
        with naming_limit():
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def place(self, address: str, port: int) -> str:
        """Return the libzmq endpoint of an address and port."""
        raise NotImplementedError

    def bind(self, socket: "zmq.Socket[bytes]", address: str, port: int) -> int:
        """Listen on a port (0: a free one) and return it; raises `OSError` or `zmq.ZMQError` if it is taken."""
        raise NotImplementedError

    def prove(self, socket: "zmq.Socket[bytes]", *, listens: bool) -> None:
        """Configure how a socket authenticates itself and checks the other side."""

    def listen(self, address: str, port: int = 0, peers: int = 0) -> "tuple[zmq.Socket[bytes], int]":
        """Listen on one address for a number of peers; returns the socket and its port.

        Raises `OSError` if the port is taken, and `RunError` if this process cannot open enough files.
        """
        self._accepts = max(self._accepts, _ACCEPTED_FILES * peers)
        socket = self._socket(zmq.ROUTER, address)
        socket.setsockopt(zmq.MAXMSGSIZE, self.part_bytes + _AROUND_BYTES)
        try:
            self.prove(socket, listens=True)
            return socket, self.bind(socket, address, port)
        except zmq.ZMQError as error:
            socket.close(0)
            if error.errno in FULL:
                raise RunError(too_many_files()) from None
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        except OSError as error:
            socket.close(0)
            if error.errno in FULL:
                raise RunError(too_many_files()) from None
            raise

    def connect(
        self, address: str, port: int, name: bytes, timeout_s: float = CONNECT_S, silence_s: float = SILENCE_S
    ) -> "Connection":
        """Connect, and wait until both sides have authenticated; raises `RuntimeError` if they do not.

        The connection breaks if the other side is silent for about `silence_s`.
        """
        deadline = time.monotonic() + timeout_s
        for again_s in (*self.again_s, None):
            connection = self._begin(address, port, name, silence_s)
            while not connection.proved and not connection.broken and time.monotonic() < deadline:
                connection.look(100)
            if connection.proved and not connection.broken:
                return connection
            connection.close()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{address}:{port} has not answered for {timeout_s:g} s")
            if again_s is None or not connection.reached:
                break
            time.sleep(again_s)
        raise RuntimeError(f"{address}:{port} {self.refused}")

    def _begin(self, address: str, port: int, name: bytes, silence_s: float) -> "Connection":
        """Start connecting; raises `RunError` if this process cannot open more files."""
        socket = self._socket(zmq.DEALER, address, silence_s)
        self.prove(socket, listens=False)
        if name:
            socket.setsockopt(zmq.IDENTITY, name)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # a unique name: pyzmq uses the file number, whose name is in use until the earlier socket has closed
        place = f"inproc://monitor-{uuid.uuid4().hex}"
        monitor: zmq.Socket[bytes] | None = None
        try:
            with naming_limit():
                socket.monitor(place, zmq.EVENT_ALL)
                monitor = self._context.socket(zmq.PAIR)
                monitor.connect(place)
                socket.connect(self.place(address, port))
        except RunError:
            for each in (monitor, socket):
                if each is not None:
                    each.close(0)
            raise
        return Connection(socket, monitor)

    def close(self) -> None:
        """Release all resources."""
        self._context.destroy(linger=0)

    def _socket(self, kind: int, address: str, silence_s: float = SILENCE_S) -> "zmq.Socket[bytes]":
        check_room(_FILES + self._accepts)
        with naming_limit():
            socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, int(":" in address))
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, _ANSWER_BYTES + _AROUND_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * CONNECT_S))  # unauthenticated connections are dropped
        socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * _OF_SILENCE * silence_s))
        socket.set_hwm(0)  # credits bound the messages in flight
        socket.setsockopt(zmq.SNDTIMEO, 0)  # a send would only block if the connection is lost, which is an error
        return socket


class Connection:
    """A connecting socket with the state of its connection, which breaks permanently."""

    def __init__(self, socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        self.socket, self._monitor = socket, monitor
        self.reached = self.proved = self.broken = False
        # holds both sockets: garbage collection of a cycle could close them in the wrong order
        self._close = weakref.finalize(self, _close, socket, monitor, os.getpid())
        self._close.atexit = False
        self._poller = zmq.Poller()
        self._poller.register(monitor, zmq.POLLIN)

    def look(self, wait_ms: int = 0) -> None:
        """Update the state from the connection's events."""
        while self._poller.poll(wait_ms):
            event = recv_monitor_message(self._monitor)["event"]
            self.reached |= event == zmq.EVENT_CONNECTED
            self.proved |= event == _PROVED
            self.broken |= event in _BROKEN
            wait_ms = 0

    def close(self) -> None:
        """Close the connection."""
        self._close()


def _close(socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", process: int) -> None:
    """Close a connection's sockets in this order: libzmq's threads block forever on events to a closed monitor."""
    if os.getpid() == process:  # a fork does not own the sockets
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)


class TcpConnections(Connections):
    """Sockets that accept every peer.

    Example:
        listener, port = TcpConnections().listen("192.168.1.10")
    """

    def place(self, address: str, port: int) -> str:
        """Return the libzmq endpoint of an address and port."""
        return f"tcp://{_host(address)}:{port}"

    def bind(self, socket: "zmq.Socket[bytes]", address: str, port: int) -> int:
        """Listen on a port, or on a free one if it is 0; returns it."""
        if not port:
            return socket.bind_to_random_port(f"tcp://{_host(address)}")
        socket.bind(self.place(address, port))
        return port


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class FolderConnections(Connections):
    """Sockets in a private folder of this account: an address is the folder's path, a port the name of a socket in it.

    No port is opened, and no key or encryption is needed, since the system denies other accounts access to a folder of
    mode 0700.

    Example:
        listener, port = FolderConnections().listen("/tmp/penstock-5f0c")
    """

    refused = "is not served by any process; check whether the process has exited"

    def place(self, address: str, port: int) -> str:
        """Return the libzmq endpoint of an address and port."""
        return f"ipc://{address}/{port}"

    def bind(self, socket: "zmq.Socket[bytes]", address: str, port: int) -> int:
        """Listen on a port, or on the first unused one if it is 0; returns it. Raises `OSError` if it is taken."""
        for number in (port,) if port else count(1):
            try:  # libzmq would replace an existing socket
                os.close(os.open(f"{address}/{number}.taken", os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            socket.bind(self.place(address, number))
            return number
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


# maximum number of concurrent handshakes; a handshake takes milliseconds
MOST_UNPROVED = 64
_POLL_MS = 100
# Bytes that this side has sent and retransmitted: `tcpi_bytes_sent` and `tcpi_bytes_retrans` of Linux's
# `struct tcp_info`, since 4.19. Until the other side has proved the key, 64 bytes of greeting and 170 of WELCOME are
# sent; with READY afterwards, more than 290. Acknowledged bytes lag: a process may receive READY before its system
# acknowledges it.
_BYTES_SENT = struct.Struct("=200xQQ")
_SENT_BEFORE_PROOF = 270
_Peer = tuple[object, ...]

T = TypeVar("T")


class Gate:
    """Closes the oldest unauthenticated connection of a listening socket when there are more than 64.

    The connection to close is one from the source address that has the most. A thread follows the socket's events until
    the socket is closed. libzmq does not report which connections have passed the handshake, so the thread reads the
    number of sent bytes from the system: only an authenticated peer is sent more than the beginning of the handshake.
    Linux before 4.19 does not report this number; there nothing is closed.

    Example:
        gate = Gate(context, listener)
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", listener: "zmq.Socket[bytes]") -> None:
        place = f"inproc://gate-{uuid.uuid4().hex}"
        listener.monitor(place, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.connect(place)
        self._unproved: dict[int, _Peer] = {}  # by file number, oldest first
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="penstock-gate", daemon=True)
        self._thread.start()

    @property
    def follows(self) -> bool:
        """True while the listening socket is open."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop following, before the context is destroyed."""
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._closing.is_set():
                if not self._monitor.poll(_POLL_MS):
                    continue
                event = recv_monitor_message(self._monitor)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                file: int = event["value"]
                self._unproved.pop(file, None)
                if event["event"] == zmq.EVENT_ACCEPTED and (peer := _ask(file, socket.socket.getpeername)):
                    self._unproved[file] = peer
                # read all events first: the file number of a closed connection may have been reused
                if len(self._unproved) > MOST_UNPROVED and not self._monitor.poll(0):
                    self._make_room()
        finally:
            self._monitor.close(0)

    def _make_room(self) -> None:
        for file, peer in list(self._unproved.items()):
            if _ask(file, partial(_is_unproved, peer=peer)) is not True:
                del self._unproved[file]
        while len(self._unproved) > MOST_UNPROVED:
            ((most, _),) = Counter(peer[0] for peer in self._unproved.values()).most_common(1)
            file = next(file for file, peer in self._unproved.items() if peer[0] == most)
            _ask(file, partial(_end, peer=self._unproved.pop(file)))


def _is_unproved(connection: socket.socket, peer: _Peer) -> bool:
    known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.size)
    if len(known) < _BYTES_SENT.size:  # an older system that does not report it: close nothing
        return False
    sent, again = _BYTES_SENT.unpack(known)
    return connection.getpeername() == peer and bool(sent - again <= _SENT_BEFORE_PROOF)


def _end(connection: socket.socket, peer: _Peer) -> None:
    if connection.getpeername() == peer:
        connection.shutdown(socket.SHUT_RDWR)


def _ask(file: int, question: Callable[[socket.socket], T]) -> T | None:
    """Query a connection that libzmq owns and may close at any time; None if it is closed."""
    own = -1
    try:
        own = os.dup(file)
        with socket.socket(fileno=own) as connection:
            own = -1
            return question(connection)
    except OSError:
        return None
    finally:
        if own >= 0:
            os.close(own)
