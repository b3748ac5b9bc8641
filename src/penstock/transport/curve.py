"""Authenticated and encrypted connections: ZeroMQ's CURVE, in a libzmq thread.

Every process of a run has the run's key, a secret of 32 bytes. Both sides of a connection use the same key: each must
prove it before the other reads a byte, and each connection has fresh session keys (http://curvezmq.org, RFC 26). A
process with the key may claim any rank; a process without it cannot connect.
"""

import os
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from penstock.errors import UsageError
from penstock.files import read_private
from penstock.transport.connections import Gate, TcpConnections

_KEY_LENGTH = 40  # 32 bytes in Z85


def make_key() -> bytes:
    """Return a new key.

    >>> len(make_key())
    40
    """
    return bytes(zmq.curve_keypair()[1])


def write_key(path: Path, key: bytes | None = None) -> None:
    """Write a key (default: a new key) to a file that only this account can read.

    Raises `UsageError` if the file exists.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write((key or make_key()) + b"\n")
    except FileExistsError:
        raise UsageError(f"keys are not overwritten, but {path} exists; choose another name") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another place") from None


def read_key(path: Path) -> bytes:
    """Read a key; raises `UsageError` if other users can read the file, and for an invalid key."""
    text = read_private(path, "create one with penstock hosts key").strip().encode()
    try:
        if len(text) != _KEY_LENGTH:
            raise ValueError
        zmq.curve_public(text)
    except (ValueError, zmq.ZMQError):
        raise UsageError(f"{path} holds no valid key; create one with penstock hosts key") from None
    return text


class Curve(TcpConnections):
    """Sockets of one process that accept only peers with the same key.

    Example:
        curve = Curve(read_key(path))
        listener, port = curve.listen("192.168.1.10")
        connection = curve.connect("192.168.1.10", port, b"1")
    """

    refused = "does not prove this run's key, or rejects this process's key"
    # libzmq allocates the announced length before authentication
    part_bytes = 64 * 2**10
    again_s = (0.05, 0.2, 0.5)  # a gate under attack also closes some connections of processes with the key

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._gates: list[Gate] = []
        self._secret, self._public = key, bytes(zmq.curve_public(key))
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether a key, in Z85, is accepted; libzmq calls this for each connection."""
        return key == self._public

    def listen(self, address: str, port: int = 0, peers: int = 0) -> "tuple[zmq.Socket[bytes], int]":
        """Listen on one address, with a limit on the number of unauthenticated connections."""
        listener, port = super().listen(address, port, peers)
        self._gates = [gate for gate in self._gates if gate.follows]
        self._gates.append(Gate(self._context, listener))
        return listener, port

    def prove(self, socket: "zmq.Socket[bytes]", *, listens: bool) -> None:
        """Configure a socket's key, and the check of the other side's key."""
        socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
        if listens:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self._public

    def close(self) -> None:
        """Release all resources."""
        for gate in self._gates:
            gate.close()
        self._authenticator.stop()
        super().close()
