"""A transport that counts sent bytes, and tracks whether its owner waits."""

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

from penstock.transport.base import Pending, Transport


class MeteredTransport:
    """A wrapper of another transport that counts sent bytes and finished waits.

    `waits` is true while the thread that created it waits for a message, or within `waiting`.

    Example:
        transport = MeteredTransport(world.transport)
        ...
        print(transport.sent_bytes)
    """

    def __init__(self, inner: Transport) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.sent_bytes = 0
        self.num_moved = 0
        self.waits = False
        self._owner = threading.get_ident()
        self._counting = threading.Lock()
        self._inner = inner

    def become(self, inner: Transport) -> None:
        """Switch to the transport of another group."""
        self.rank, self.size, self._inner = inner.rank, inner.size, inner

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer and count it."""
        with self._counting:
            self.sent_bytes += buffer.nbytes
        return _MeteredPending(self, self._inner.send(buffer, to, tag))

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for the next message on a tag."""
        return _MeteredPending(self, self._inner.receive(buffer, source, tag))

    def abort(self) -> None:
        """End every wait of this process."""
        self._inner.abort()

    def close(self) -> None:
        """Close all connections."""
        self._inner.close()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the owner as waiting, if it is the caller; the end counts as progress."""
        owner = threading.get_ident() == self._owner
        self.waits = self.waits or owner
        try:
            yield
        finally:
            with self._counting:
                self.num_moved += 1
            self.waits = self.waits and not owner


class _MeteredPending:
    def __init__(self, transport: MeteredTransport, inner: Pending) -> None:
        self._transport, self._inner = transport, inner

    def wait(self) -> None:
        with self._transport.waiting():
            self._inner.wait()
