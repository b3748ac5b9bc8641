"""The seam between stages and the network: four methods, and an in-process network for tests.

Receives are posted before the message comes, sends return at once; both give a `Pending`. Messages
between two ranks on one channel arrive in the order they were sent. A message may be shorter than
the buffer that was posted for it, never longer.
"""

import queue
import threading
from collections import defaultdict
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import TransportError


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Block until it is done; raises `TransportError` when the connection is gone."""

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""


class Transport(Protocol):
    """Moves bytes between ranks; buffers are contiguous uint8 tensors that stay untouched until done."""

    rank: int
    size: int

    def send(self, buffer: Tensor, to: int, channel: int) -> Pending:
        """Send a buffer without waiting."""

    def receive(self, buffer: Tensor, source: int, channel: int) -> Pending:
        """Post a buffer for the next message on a channel."""

    def abort(self) -> None:
        """End every wait of this process with a `TransportError`, now and from now on."""

    def close(self) -> None:
        """Let go of all connections."""


class MemoryNetwork:
    """Ranks within one process that exchange buffers through queues.

    Example:
        network = MemoryNetwork(2)
        pending = network.transports[1].receive(buffer, source=0, channel=7)
        network.transports[0].send(message, to=1, channel=7).wait()
    """

    def __init__(self, size: int) -> None:
        self.queues: dict[tuple[int, int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.transports = [MemoryTransport(self, rank, size) for rank in range(size)]

    def queue(self, source: int, to: int, channel: int) -> queue.Queue[Tensor]:
        """Give the queue of messages from one rank to another on one channel."""
        with self.lock:
            return self.queues[source, to, channel]


class MemoryTransport:
    """One rank's end of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._network = network
        self._aborted = threading.Event()

    def send(self, buffer: Tensor, to: int, channel: int) -> Pending:
        """Copy the buffer into the receiver's queue."""
        self._check()
        self._network.queue(self.rank, to, channel).put(buffer.clone())
        return _Done()

    def receive(self, buffer: Tensor, source: int, channel: int) -> Pending:
        """Wait for the copy when asked to."""
        self._check()
        return _MemoryReceive(self._network.queue(source, self.rank, channel), buffer, self._aborted)

    def abort(self) -> None:
        """End every wait."""
        self._aborted.set()

    def close(self) -> None:
        """Nothing is held."""

    def _check(self) -> None:
        if self._aborted.is_set():
            raise TransportError("the connection was given up")


class _Done:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class _MemoryReceive:
    def __init__(self, messages: "queue.Queue[Tensor]", buffer: Tensor, aborted: threading.Event) -> None:
        self._messages = messages
        self._buffer = buffer
        self._aborted = aborted

    def wait(self) -> None:
        while True:
            try:
                message = self._messages.get(timeout=0.02)
                break
            except queue.Empty:
                if self._aborted.is_set():
                    raise TransportError("the connection was given up") from None
        if message.numel() > self._buffer.numel():
            raise TransportError(
                f"a message of {message.numel()} bytes does not fit the {self._buffer.numel()} that were posted"
            )
        self._buffer[: message.numel()] = message

    def done(self) -> bool:
        return not self._messages.empty()


CONTROL_CHANNEL = 0


def send_bytes(transport: Transport, data: bytes, to: int, channel: int = CONTROL_CHANNEL) -> None:
    """Send bytes of any length to a rank that calls `receive_bytes`, and wait until they are gone."""
    length = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
    transport.send(length, to, channel).wait()
    if data:
        transport.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, channel).wait()


def receive_bytes(transport: Transport, source: int, channel: int = CONTROL_CHANNEL, limit: int = 2**31) -> bytes:
    """Wait for the bytes of `send_bytes`; raises `TransportError` for more than `limit`."""
    length = torch.empty(8, dtype=torch.uint8)
    transport.receive(length, source, channel).wait()
    size = int.from_bytes(bytes(length.tolist()), "little")
    if size > limit:
        raise TransportError(f"rank {source} announced {size} bytes, beyond the limit of {limit}")
    data = torch.empty(size, dtype=torch.uint8)
    if size:
        transport.receive(data, source, channel).wait()
    return data.numpy().tobytes()


def send_tensor(transport: Transport, tensor: Tensor, to: int, channel: int = CONTROL_CHANNEL) -> None:
    """Send a tensor whose shape and dtype the receiver knows."""
    if tensor.numel():
        transport.send(tensor.detach().contiguous().reshape(-1).view(torch.uint8), to, channel).wait()


def receive_tensor(transport: Transport, tensor: Tensor, source: int, channel: int = CONTROL_CHANNEL) -> None:
    """Fill a contiguous tensor with what `send_tensor` sent."""
    if tensor.numel():
        transport.receive(tensor.reshape(-1).view(torch.uint8), source, channel).wait()
