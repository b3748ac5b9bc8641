"""A limit on the unauthenticated connections of a listening socket."""

import os
import socket
import struct
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

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
