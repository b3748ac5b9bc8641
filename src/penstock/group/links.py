"""What the processes of a run reach each other by: plain connections, encrypted ones, or a folder of one machine."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from penstock.group.addresses import is_folder
from penstock.group.board import connect_board, serve_store
from penstock.group.liveness import Boards
from penstock.group.variables import KEY
from penstock.transport.base import SILENCE_S, Transport
from penstock.transport.gloo import GlooTransport
from penstock.transport.watched import run_watched

if TYPE_CHECKING:
    from penstock.transport.connections import Connections

Watch = Callable[[], None]


class Links(Protocol):
    """Stores and transports of one kind."""

    secured: bool
    connect_s: float  # what connecting to a store may take

    def serve_store(self, address: str, port: int = 0) -> TCPStore:
        """Serve a store on one address alone; raises `OSError` where the port is taken."""

    def connect_store(self, address: str, port: int, silence_s: float = SILENCE_S) -> Store:
        """Connect to a store whose process may be silent for so long; raises `RuntimeError` where that cannot be."""

    def make_transport(
        self, connect: Callable[[], Store], name: str, rank: int, size: int, address: str, join_s: float, watch: Watch
    ) -> tuple[Transport, Store]:
        """Connect the ranks of a group; returns the transport and the group's own part of the store."""


class PlainLinks:
    """TCP and gloo, for a network that is trusted."""

    secured = False
    connect_s = Boards.connect_s

    def serve_store(self, address: str, port: int = 0) -> TCPStore:
        """Serve a store on one address alone."""
        return serve_store(address, port)

    def connect_store(self, address: str, port: int, silence_s: float = SILENCE_S) -> Store:  # noqa: ARG002
        """Connect to a store; whether it has been silent is looked after by whoever asks."""
        return connect_board(address, port)

    def make_transport(
        self, connect: Callable[[], Store], name: str, rank: int, size: int, address: str, join_s: float, watch: Watch
    ) -> tuple[Transport, Store]:
        """Connect the ranks of a group over gloo."""
        store = PrefixStore(f"penstock/{name}", run_watched(connect, watch, join_s))
        return GlooTransport(store, rank, size, address, join_s=join_s / 2, watch=watch), store


class ZmqLinks:
    """ZeroMQ's connections, of one kind or another."""

    secured = False

    def __init__(self, connections: "Connections") -> None:
        from penstock.transport.connections import CONNECT_S  # what only some runs need

        self.connect_s = CONNECT_S
        self._connections = connections

    def serve_store(self, address: str, port: int = 0) -> TCPStore:
        """Serve a store on one address alone."""
        from penstock.group.zmq_store import StoreServer

        return cast(TCPStore, StoreServer(self._connections, address, port))

    def connect_store(self, address: str, port: int, silence_s: float = SILENCE_S) -> Store:
        """Connect to a store."""
        from penstock.group.zmq_store import ZmqStore

        return cast(Store, ZmqStore(self._connections, address, port, silence_s=silence_s))

    def make_transport(
        self, connect: Callable[[], Store], name: str, rank: int, size: int, address: str, join_s: float, watch: Watch
    ) -> tuple[Transport, Store]:
        """Connect the ranks of a group, each to every other."""
        from penstock.group.zmq_store import Prefixed
        from penstock.transport.zeromq import ZmqTransport

        store = Prefixed(run_watched(connect, watch, join_s), f"penstock/{name}")
        made = ZmqTransport(self._connections, store, rank, size, address, join_s=join_s / 2, group=name, watch=watch)
        return made, self._torch_store(address, name)

    def _torch_store(self, address: str, name: str) -> Store:
        """Return a store of torch's for what needs one, which NCCL alone does."""
        return FileStore(str(Path(address) / f"{name}.store"))


class SecuredLinks(ZmqLinks):
    """Connections that prove the run's key and are encrypted; see `transport/curve.py`."""

    secured = True

    def __init__(self, key: bytes) -> None:
        from penstock.transport.curve import Curve

        super().__init__(Curve(key))

    def _torch_store(self, _address: str, _name: str) -> Store:
        return HashStore()  # nothing needs one: NCCL does not encrypt


def close_store(store: Store) -> None:
    """Serve a store no more; torch's ends with the last reference to it."""
    if hasattr(store, "close"):
        store.close()


def choose_links(address: str) -> Links:
    """Return the links to an address: those of the key that this process was given, or of a folder, or plain ones.

    Raises `UsageError` for a key that cannot be used.
    """
    if is_folder(address):
        from penstock.transport.folder import FolderConnections

        return ZmqLinks(FolderConnections())
    path = os.environ.get(KEY)
    if not path:
        return PlainLinks()
    from penstock.transport.curve import read_key

    return SecuredLinks(read_key(Path(path)))
