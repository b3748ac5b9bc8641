"""What the processes of a run reach each other by: plain connections, or those that prove a key and are encrypted."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from penstock.group.board import connect_board, serve_store
from penstock.group.liveness import Boards
from penstock.group.variables import KEY
from penstock.transport.base import Transport
from penstock.transport.gloo import GlooTransport
from penstock.transport.watched import run_watched

Watch = Callable[[], None]


class Links(Protocol):
    """Stores and transports of one kind."""

    secured: bool
    connect_s: float  # what connecting to a store may take

    def serve_store(self, address: str, port: int = 0) -> TCPStore:
        """Serve a store on one address alone; raises `OSError` where the port is taken."""

    def connect_store(self, address: str, port: int) -> Store:
        """Connect to a store; raises `RuntimeError` where that cannot be."""

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

    def connect_store(self, address: str, port: int) -> Store:
        """Connect to a store."""
        return connect_board(address, port)

    def make_transport(
        self, connect: Callable[[], Store], name: str, rank: int, size: int, address: str, join_s: float, watch: Watch
    ) -> tuple[Transport, Store]:
        """Connect the ranks of a group over gloo."""
        store = PrefixStore(f"penstock/{name}", run_watched(connect, watch, join_s))
        return GlooTransport(store, rank, size, address, join_s=join_s / 2, watch=watch), store


class SecuredLinks:
    """Connections that prove the run's key and are encrypted; see `transport/curve.py`."""

    secured = True

    def __init__(self, key: bytes) -> None:
        from penstock.transport.curve import CONNECT_S, Curve  # what only some runs need

        self.connect_s = CONNECT_S
        self._curve = Curve(key)

    def serve_store(self, address: str, port: int = 0) -> TCPStore:
        """Serve a store on one address alone."""
        from penstock.group.secured_store import StoreServer

        return cast(TCPStore, StoreServer(self._curve, address, port))

    def connect_store(self, address: str, port: int) -> Store:
        """Connect to a store."""
        from penstock.group.secured_store import SecuredStore

        return cast(Store, SecuredStore(self._curve, address, port))

    def make_transport(
        self, connect: Callable[[], Store], name: str, rank: int, size: int, address: str, join_s: float, watch: Watch
    ) -> tuple[Transport, Store]:
        """Connect the ranks of a group, each to every other."""
        from penstock.group.secured_store import Prefixed
        from penstock.transport.secured import SecuredTransport

        store = Prefixed(run_watched(connect, watch, join_s), f"penstock/{name}")
        made = SecuredTransport(self._curve, store, rank, size, address, join_s=join_s / 2, watch=watch)
        return made, HashStore()  # nothing else needs one: NCCL, which would, does not encrypt


def close_store(store: Store) -> None:
    """Serve a store no more; torch's ends with the last reference to it."""
    if hasattr(store, "close"):
        store.close()


def choose_links() -> Links:
    """Return the links that this process was told to use: those of a key, where it was given one.

    Raises `UsageError` for a key that cannot be used.
    """
    path = os.environ.get(KEY)
    if not path:
        return PlainLinks()
    from penstock.transport.curve import read_key

    return SecuredLinks(read_key(Path(path)))
