"""Connections that prove a key and are encrypted: ZeroMQ's CURVE, in a thread of libzmq's own.

Whoever takes part in a run has its key, a secret of 32 bytes. It is the listening side's key and the connecting
side's: each proves it before a byte of the other is read, and the keys of a connection are made for it alone
(http://curvezmq.org, RFC 26). Who has the key is trusted to be who it says; without it a connection gets nowhere.
"""

import os
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from penstock.errors import UsageError
from penstock.files import read_private
from penstock.transport.connections import Connections
from penstock.transport.gate import Gate

_KEY_LENGTH = 40  # 32 bytes in Z85


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
    text = read_private(path, "make one with penstock keys new").strip().encode()
    try:
        if len(text) != _KEY_LENGTH:
            raise ValueError
        zmq.curve_public(text)
    except (ValueError, zmq.ZMQError):
        raise UsageError(f"{path} holds no key; make one with penstock keys new") from None
    return text


class Curve(Connections):
    """Sockets of one process that speak with those alone that have a key.

    Example:
        curve = Curve(read_key(path))
        listener, port = curve.listen("192.168.1.10")
        connection = curve.connect("192.168.1.10", port, b"1")
    """

    refused = "does not prove this run's key, or does not take the one that is here"
    # what a stranger announces is made room for before it has proved anything
    part_bytes = 64 * 2**10
    again_s = (0.05, 0.2, 0.5)  # a gate that is flooded closes some that would have proved the key

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._gates: list[Gate] = []
        self._secret, self._public = key, bytes(zmq.curve_public(key))
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a key, in Z85, is let in: libzmq asks this of each that connects."""
        return key == self._public

    def listen(self, address: str, port: int = 0) -> "tuple[zmq.Socket[bytes], int]":
        """Listen on one address, with a bound on how many connections there may be that have proved nothing."""
        listener, port = super().listen(address, port)
        self._gates = [gate for gate in self._gates if gate.follows]
        self._gates.append(Gate(self._context, listener))
        return listener, port

    def place(self, address: str, port: int) -> str:
        """Return what libzmq calls a place."""
        return f"tcp://{_host(address)}:{port}"

    def bind(self, socket: "zmq.Socket[bytes]", address: str, port: int) -> int:
        """Listen on a port, any where it is 0; returns it."""
        if not port:
            return socket.bind_to_random_port(f"tcp://{_host(address)}")
        socket.bind(self.place(address, port))
        return port

    def prove(self, socket: "zmq.Socket[bytes]", *, listens: bool) -> None:
        """Have a socket prove the key, and ask the other side for it."""
        socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
        if listens:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self._public

    def close(self) -> None:
        """Let go of everything."""
        for gate in self._gates:
            gate.close()
        self._authenticator.stop()
        super().close()


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
