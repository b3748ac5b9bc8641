"""Connections between the processes of a run: plain, encrypted, or Unix domain sockets in a private folder."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from penstock.group.addresses import is_folder
from penstock.group.board import connect_board, serve_store
from penstock.group.launcher import KEY
from penstock.group.liveness import Boards
from penstock.transport.base import SILENCE_S, Transport, run_watched

if TYPE_CHECKING:
    from penstock.transport.connections import Connections
    from penstock.transport.zeromq import Addresses

Watch = Callable[[], None]


class Links(Protocol):
    """Stores and transports of one kind."""

    secured: bool
    connect_s: float  # timeout for connecting to another rank's board, without looking up names (see `Boards`)

    def serve_store(self, address: str, port: int = 0, peers: int = 0) -> TCPStore:
        """Serve a store to a number of peers on a single address; raises `OSError` if the port is taken."""

    def connect_store(self, address: str, port: int, silence_s: float = SILENCE_S) -> Store:
        """Connect to a store whose process may be silent for `silence_s`; raises `RuntimeError` if that fails."""

    def make_transport(
        self, connect: Callable[[], Store], name: str, rank: int, size: int, address: str, join_s: float, watch: Watch
    ) -> tuple[Transport, Store]:
        """Connect the ranks of a group; returns the transport and a torch store for NCCL."""


class PlainLinks:
    """TCP without a key, for a trusted network: torch's store, and a transport over ZeroMQ."""

    secured = False
    connect_s = Boards.connect_s

    def __init__(self) -> None:
        self._connections: Connections | None = None

    def serve_store(self, address: str, port: int = 0, peers: int = 0) -> TCPStore:  # noqa: ARG002
        """Serve a store on a single address."""
        return serve_store(address, port)

    def connect_store(self, address: str, port: int, silence_s: float = SILENCE_S) -> Store:  # noqa: ARG002
        """Connect to a store; the caller checks for silence."""
        return connect_board(address, port)

    def make_transport(
        self, connect: Callable[[], Store], name: str, rank: int, size: int, address: str, join_s: float, watch: Watch
    ) -> tuple[Transport, Store]:
        """Connect the ranks of a group, each to every other."""
        from penstock.transport.connections import TcpConnections

        store = PrefixStore(f"penstock/{name}", run_watched(connect, watch, join_s))
        connections = self._connections = self._connections or TcpConnections()
        # torch's store blocks for as long as its process is silent
        made = run_watched(
            lambda: _connect(connections, store, name, rank, size, address, join_s, watch), watch, 2 * join_s
        )
        return made, store


class ZmqLinks:
    """ZeroMQ connections: encrypted, or Unix domain sockets in a private folder."""

    secured = False

    def __init__(self, connections: "Connections") -> None:
        from penstock.transport.connections import CONNECT_S  # only some runs need it

        self.connect_s = CONNECT_S
        self._connections = connections

    def serve_store(self, address: str, port: int = 0, peers: int = 0) -> TCPStore:
        """Serve a store on a single address."""
        from penstock.group.zmq_store import StoreServer

        return cast(TCPStore, StoreServer(self._connections, address, port, peers))

    def connect_store(self, address: str, port: int, silence_s: float = SILENCE_S) -> Store:
        """Connect to a store."""
        from penstock.group.zmq_store import ZmqStore

        return cast(Store, ZmqStore(self._connections, address, port, silence_s=silence_s))

    def make_transport(
        self, connect: Callable[[], Store], name: str, rank: int, size: int, address: str, join_s: float, watch: Watch
    ) -> tuple[Transport, Store]:
        """Connect the ranks of a group, each to every other."""
        from penstock.group.zmq_store import Prefixed

        store = Prefixed(run_watched(connect, watch, join_s), f"penstock/{name}")
        made = _connect(self._connections, store, name, rank, size, address, join_s, watch)
        return made, self._torch_store(address, name)

    def _torch_store(self, address: str, name: str) -> Store:
        """Return a torch store, which only NCCL needs."""
        return FileStore(str(Path(address) / f"{name}.store"))


class SecuredLinks(ZmqLinks):
    """Connections authenticated by the run's key and encrypted; see `transport/curve.py`."""

    secured = True

    def __init__(self, key: bytes) -> None:
        from penstock.transport.curve import Curve

        super().__init__(Curve(key))

    def _torch_store(self, _address: str, _name: str) -> Store:
        return HashStore()  # unused: NCCL does not encrypt


def _connect(
    connections: "Connections",
    store: "Addresses",
    name: str,
    rank: int,
    size: int,
    address: str,
    join_s: float,
    watch: Watch,
) -> Transport:
    from penstock.transport.zeromq import ZmqTransport

    return ZmqTransport(connections, store, rank, size, address, join_s=join_s / 2, group=name, watch=watch)


def close_store(store: Store) -> None:
    """Stop serving a store; torch's stops with the last reference to it."""
    if hasattr(store, "close"):
        store.close()


def choose_links(address: str) -> Links:
    """Return the links for an address: Unix domain sockets for a folder, encrypted if PENSTOCK_KEY is set, or plain.

    Raises `UsageError` if the key is not usable.
    """
    if is_folder(address):
        from penstock.transport.connections import FolderConnections

        return ZmqLinks(FolderConnections())
    path = os.environ.get(KEY)
    if not path:
        return PlainLinks()
    from penstock.transport.curve import read_key

    return SecuredLinks(read_key(Path(path)))
