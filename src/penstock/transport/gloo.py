"""A transport over torch.distributed's gloo."""

import contextlib
import datetime
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken, RunError
from penstock.text import first_line
from penstock.transport.base import Pending
from penstock.transport.waits import Waits
from penstock.transport.watched import run_watched

# gloo closes a connection permanently when a wait times out, so waits get no deadline; `health` watches instead
_NO_DEADLINE = datetime.timedelta(days=365)
_AT_ONCE = datetime.timedelta(milliseconds=1)
# a tag that nothing else uses
_NOBODY_SENDS = 2**31 - 1


class GlooTransport:
    """Point-to-point messages over a separate gloo group; the process's default group is unchanged.

    The ranks exchange addresses through `store`; `address` is the local address to listen on. Connecting takes at most
    `join_s` seconds, during which `watch` is called and may raise sooner. Raises `RunError` if the ranks cannot
    reach each other.

    Example:
        GlooTransport(store, rank=0, size=2, address="127.0.0.1")
    """

    def __init__(
        self, store: Store, rank: int, size: int, address: str, *, join_s: float = 60.0, name: str = "data",
        watch: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.size = size
        self._aborted = False
        self._waits = Waits("penstock-gloo")
        # the only way to create a group without the process's default group; typed as private, documented for gloo
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = datetime.timedelta(seconds=join_s)
        prefixed = PrefixStore(f"penstock/{name}", store)
        try:
            self._group: ProcessGroupGloo | None = run_watched(
                lambda: ProcessGroupGloo(prefixed, rank, size, options), watch, 2 * join_s
            )
        except RuntimeError as error:
            raise RunError(
                f"the {size} processes met but cannot connect from {address}: {first_line(error)}; "
                "check that every host reaches every other"
            ) from error

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer without waiting."""
        return self._start("send", buffer, to, tag)

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for the next message on a tag."""
        return self._start("recv", buffer, source, tag)

    def abort(self) -> None:
        """End all waits of this process, and waits of other processes for it, by closing all connections.

        A wait that times out closes the connections, and operations in flight raise. The wait here is for a message
        that no rank sends: with two waits for the same message, one would receive it and the other stay blocked.
        gloo does not tell operations whose message is on its way, here or on other ranks, and they would wait forever:
        so every wait is in a thread that can be left behind, and looks whether its connection still stands.
        """
        self._aborted = True
        if (group := self._group) is not None:
            for peer in set(range(self.size)) - {self.rank}:
                nothing = torch.zeros(1, dtype=torch.uint8)
                with contextlib.suppress(RuntimeError):  # it timed out, or the connection was closed before
                    group.recv([nothing], peer, _NOBODY_SENDS).wait(_AT_ONCE)  # type: ignore[attr-defined]
        self._waits.give_up()

    def close(self) -> None:
        """Close all connections."""
        self._group = None
        self._waits.close()

    def look(self, peer: int) -> None:
        """Raise `RuntimeError` if the connection to a rank has been closed, by posting a receive that never ends."""
        if self._group is not None:
            self._group.recv([torch.zeros(1, dtype=torch.uint8)], peer, _NOBODY_SENDS)  # type: ignore[attr-defined]

    def _start(self, kind: str, buffer: Tensor, peer: int, tag: int) -> Pending:
        group = self._group
        if group is None or self._aborted:
            raise ConnectionBroken(f"the connection to rank {peer} was aborted")
        operation = group.send if kind == "send" else group.recv  # type: ignore[attr-defined]
        try:
            work = operation([buffer], peer, tag)
        except RuntimeError as error:
            raise ConnectionBroken(f"the connection to rank {peer} broke: {first_line(error)}") from error
        return _GlooPending(self._waits, work, peer, partial(self.look, peer))


class _GlooPending:
    def __init__(self, waits: Waits, work: Work, peer: int, look: Callable[[], None]) -> None:
        self._waits, self._work, self._peer, self._look = waits, work, peer, look

    def wait(self) -> None:
        try:
            self._waits.run(partial(self._work.wait, _NO_DEADLINE), self._look)
        except RuntimeError as error:
            raise ConnectionBroken(f"the connection to rank {self._peer} broke: {first_line(error)}") from error
