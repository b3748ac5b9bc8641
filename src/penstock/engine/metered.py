"""A transport that counts what it sends."""

from torch import Tensor

from penstock.engine.transport import Pending, Transport


class MeteredTransport:
    """Passes everything on to another transport and counts the bytes that leave.

    Example:
        transport = MeteredTransport(world.transport)
        ...
        print(transport.sent_bytes)
    """

    def __init__(self, inner: Transport) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.sent_bytes = 0
        self._inner = inner

    def send(self, buffer: Tensor, to: int, channel: int) -> Pending:
        """Send a buffer and count it."""
        self.sent_bytes += buffer.nbytes
        return self._inner.send(buffer, to, channel)

    def receive(self, buffer: Tensor, source: int, channel: int) -> Pending:
        """Post a buffer for the next message on a channel."""
        return self._inner.receive(buffer, source, channel)

    def abort(self) -> None:
        """End every wait of this process."""
        self._inner.abort()

    def close(self) -> None:
        """Let go of all connections."""
        self._inner.close()
