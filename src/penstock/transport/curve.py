"""Connections that prove a key and are encrypted: ZeroMQ's CURVE, in a thread of libzmq's own.

Whoever takes part in a run has its key, a secret of 32 bytes. It is the listening side's key and the connecting
side's: each proves it before a byte of the other is read, and the keys of a connection are made for it alone
(http://curvezmq.org, RFC 26). Who has the key is trusted to be who it says; without it a connection gets nowhere.
"""

import os
import stat
import time
import uuid
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from penstock.errors import UsageError

_KEY_LENGTH = 40  # 32 bytes in Z85
# no part of a message is longer: what a stranger announces before it has proved anything is not made room for
PART_BYTES = 4 * 2**20
# whether a key is right is decided in Python: by a process that imports, or has little of a core, seconds later
CONNECT_S = 30.0
_AROUND_BYTES = 1024  # what encryption adds to a part
# libzmq's thread asks by itself whether the other side's is alive, also while that interpreter's lock is held
_BEAT_MS, _SILENCE_MS = 1000, 4000
_PROVED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_BROKEN = (
    zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)  # fmt: skip


def make_key() -> bytes:
    """Return a new key.

    >>> len(make_key())
    40
    """
    return bytes(zmq.curve_keypair()[1])


def write_key(path: Path, key: bytes | None = None) -> None:
    """Write a key, a new one where none is given, to a file that only this account reads.

    Raises `UsageError` where there is a file already.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write((key or make_key()) + b"\n")
    except FileExistsError:
        raise UsageError(f"a key is not written over, but {path} is there; choose another name") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another place") from None


def read_key(path: Path) -> bytes:
    """Read a key; raises `UsageError` for a file that others may read, and for what is no key."""
    try:
        mode, text = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read ({error.strerror}); make one with penstock keys new") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"a key is its owner's alone, but others may read {path}; chmod 600 {path}, or make another")
    try:
        if len(text) != _KEY_LENGTH:
            raise ValueError
        zmq.curve_public(text)
    except (ValueError, zmq.ZMQError):
        raise UsageError(f"{path} holds no key; make one with penstock keys new") from None
    return text


class Curve:
    """Sockets of one process that speak with those alone that have a key.

    Example:
        curve = Curve(read_key(path))
        listener, port = curve.listen("192.168.1.10")
        socket = curve.connect("192.168.1.10", port, b"1")
    """

    def __init__(self, key: bytes) -> None:
        self._secret, self._public = key, bytes(zmq.curve_public(key))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a key, in Z85, is let in: libzmq asks this of each that connects."""
        return key == self._public

    def listen(self, address: str, port: int = 0) -> "tuple[zmq.Socket[bytes], int]":
        """Listen on one address; returns the socket and its port. Raises `OSError` where the port is taken."""
        socket = self._socket(zmq.ROUTER, address)
        socket.curve_server = True
        try:
            if port:
                socket.bind(f"tcp://{_host(address)}:{port}")
            else:
                port = socket.bind_to_random_port(f"tcp://{_host(address)}")
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        return socket, port

    def connect(self, address: str, port: int, name: bytes, timeout_s: float = CONNECT_S) -> "Connection":
        """Connect, and wait until both sides have proved the key; raises `RuntimeError` where they do not."""
        socket = self._socket(zmq.DEALER, address)
        socket.curve_serverkey = self._public
        if name:
            socket.setsockopt(zmq.IDENTITY, name)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # a name of its own: what pyzmq makes of the file's number is taken while another socket of it is being closed
        place = f"inproc://monitor-{uuid.uuid4().hex}"
        socket.monitor(place, zmq.EVENT_ALL)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(place)
        connection = Connection(socket, monitor)
        socket.connect(f"tcp://{_host(address)}:{port}")
        deadline = time.monotonic() + timeout_s
        while not connection.proved:
            connection.look(100)
            if connection.broken or time.monotonic() > deadline:
                connection.close()
                raise RuntimeError(
                    f"{address}:{port} does not prove this run's key, or does not take the one that is here"
                    if connection.broken else f"{address}:{port} has not answered for {timeout_s:g} s"
                )  # fmt: skip
        return connection

    def close(self) -> None:
        """Let go of everything."""
        self._authenticator.stop()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, int(":" in address))
        socket.linger = 0
        socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
        socket.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + _AROUND_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * CONNECT_S))  # a connection that proves nothing is dropped
        socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        socket.set_hwm(0)  # credits bound what is under way
        socket.setsockopt(zmq.SNDTIMEO, 0)  # so that only a connection that is gone takes nothing, which is an error
        return socket


class Connection:
    """A connecting socket, and whether its connection stands; it breaks for good."""

    def __init__(self, socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        self.socket, self._monitor = socket, monitor
        self.proved = self.broken = False
        self._poller = zmq.Poller()
        self._poller.register(monitor, zmq.POLLIN)

    def look(self, wait_ms: int = 0) -> None:
        """Take note of what has happened to the connection."""
        while self._poller.poll(wait_ms):
            event = recv_monitor_message(self._monitor)["event"]
            self.proved |= event == _PROVED
            self.broken |= event in _BROKEN
            wait_ms = 0

    def close(self) -> None:
        """Let go of the connection."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
