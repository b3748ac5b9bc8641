"""A transport between threads of one process, for tests and for modules that run in threads."""

import threading
from collections import defaultdict, deque

from torch import Tensor

from penstock.errors import ConnectionBroken, TransportError
from penstock.transport.base import Pending


class MemoryNetwork:
    """A network of ranks within one process, which also serves as a reference transport.

    A send is done when the receiver has posted a buffer for it, and a rank that aborts also ends waits of
    other ranks for it.

    Example:
        network = MemoryNetwork(2)
        pending = network.transports[1].receive(buffer, source=0, tag=7)
        network.transports[0].send(message, to=1, tag=7).wait()
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.gone: set[int] = set()
        self.lanes: defaultdict[tuple[int, int, int], _Lane] = defaultdict(_Lane)
        self.transports = [MemoryTransport(self, rank, size) for rank in range(size)]

    def num_open(self) -> int:
        """Count the unmatched sends and receives."""
        return sum(len(lane.sends) + len(lane.receives) for lane in self.lanes.values())


class MemoryTransport:
    """One rank's end of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._network = network

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Queue the buffer for a rank, after earlier ones."""
        pending = _MemoryPending(self._network, buffer, (self.rank, to))
        with self._network.changed:
            pending.check()
            lane = self._network.lanes[self.rank, to, tag]
            lane.sends.append(pending)
            lane.meet()
            self._network.changed.notify_all()
        return pending

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for a rank's message, after earlier ones."""
        pending = _MemoryPending(self._network, buffer, (self.rank, source))
        with self._network.changed:
            pending.check()
            lane = self._network.lanes[source, self.rank, tag]
            lane.receives.append(pending)
            lane.meet()
            self._network.changed.notify_all()
        return pending

    def abort(self) -> None:
        """End all waits of this rank, and waits of other ranks for it."""
        with self._network.changed:
            self._network.gone.add(self.rank)
            self._network.changed.notify_all()

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class _MemoryPending:
    def __init__(self, network: MemoryNetwork, buffer: Tensor, ranks: tuple[int, int]) -> None:
        self.buffer = buffer
        self.done = False
        self.error: TransportError | None = None
        self._network = network
        self._ranks = ranks

    def wait(self) -> None:
        with self._network.changed:
            while not self.done:
                self.check()
                self._network.changed.wait()
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        return self.done or not self._network.gone.isdisjoint(self._ranks)

    def check(self) -> None:
        if not self._network.gone.isdisjoint(self._ranks):
            raise ConnectionBroken(f"the connection to rank {self._ranks[1]} was aborted")


class _Lane:
    """Sends from one rank to another on one tag, and the buffers posted for these sends."""

    def __init__(self) -> None:
        self.sends: deque[_MemoryPending] = deque()
        self.receives: deque[_MemoryPending] = deque()

    def meet(self) -> None:
        """Copy each message into its posted buffer."""
        while self.sends and self.receives:
            sent, received = self.sends.popleft(), self.receives.popleft()
            size, room = sent.buffer.numel(), received.buffer.numel()
            if size > room:
                received.error = TransportError(f"a message of {size} bytes does not fit the posted buffer of {room}")
            else:
                received.buffer[:size] = sent.buffer
            sent.done = received.done = True
