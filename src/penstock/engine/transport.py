"""The seam between stages and the network: four methods, and an in-process network for tests.

Receives are posted before the message comes, sends return at once; both give a `Pending`. A send is
done when a receive has been posted for it, at the earliest. Messages between two ranks on one
channel arrive in the order they were sent. A message may be shorter than the buffer that was posted
for it, never longer. Channels below 0 carry buffers on devices, where a transport has a way for them
(`engine/nccl.py`): there a receive is as long as what is sent.
"""

import struct
import threading
import zlib
from collections import defaultdict, deque
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import ConnectionBroken, TransportError


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Block until it is done; raises `ConnectionBroken` when the connection is gone."""


class Transport(Protocol):
    """Moves bytes between ranks; buffers are contiguous uint8 tensors that stay untouched until done."""

    rank: int
    size: int

    def send(self, buffer: Tensor, to: int, channel: int) -> Pending:
        """Send a buffer without waiting."""

    def receive(self, buffer: Tensor, source: int, channel: int) -> Pending:
        """Post a buffer for the next message on a channel."""

    def abort(self) -> None:
        """End every wait of this process with `ConnectionBroken`, now and from now on."""

    def close(self) -> None:
        """Let go of all connections."""


class MemoryNetwork:
    """Ranks within one process that exchange buffers: for tests, and the shortest description of a transport.

    As with gloo a send is done when the receiver has posted a buffer for it, and a rank that aborts
    also ends the waits of others for it.

    Example:
        network = MemoryNetwork(2)
        pending = network.transports[1].receive(buffer, source=0, channel=7)
        network.transports[0].send(message, to=1, channel=7).wait()
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.gone: set[int] = set()
        self.lanes: defaultdict[tuple[int, int, int], _Lane] = defaultdict(_Lane)
        self.transports = [MemoryTransport(self, rank, size) for rank in range(size)]

    def num_open(self) -> int:
        """Count the sends and receives that nobody has met yet."""
        return sum(len(lane.sends) + len(lane.receives) for lane in self.lanes.values())


class MemoryTransport:
    """One rank's end of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._network = network

    def send(self, buffer: Tensor, to: int, channel: int) -> Pending:
        """Put the buffer behind those on their way to a rank."""
        pending = _MemoryPending(self._network, buffer, (self.rank, to))
        with self._network.changed:
            pending.check()
            lane = self._network.lanes[self.rank, to, channel]
            lane.sends.append(pending)
            lane.meet()
            self._network.changed.notify_all()
        return pending

    def receive(self, buffer: Tensor, source: int, channel: int) -> Pending:
        """Post a buffer behind those that wait for a rank."""
        pending = _MemoryPending(self._network, buffer, (self.rank, source))
        with self._network.changed:
            pending.check()
            lane = self._network.lanes[source, self.rank, channel]
            lane.receives.append(pending)
            lane.meet()
            self._network.changed.notify_all()
        return pending

    def abort(self) -> None:
        """End every wait of this rank, and of others for it."""
        with self._network.changed:
            self._network.gone.add(self.rank)
            self._network.changed.notify_all()

    def close(self) -> None:
        """Nothing is held."""


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

    def check(self) -> None:
        if not self._network.gone.isdisjoint(self._ranks):
            raise ConnectionBroken(f"the connection to rank {self._ranks[1]} was given up")


class _Lane:
    """What was sent from one rank to another on one channel, and the buffers posted for it."""

    def __init__(self) -> None:
        self.sends: deque[_MemoryPending] = deque()
        self.receives: deque[_MemoryPending] = deque()

    def meet(self) -> None:
        """Copy each message into the buffer that waits for it."""
        while self.sends and self.receives:
            sent, received = self.sends.popleft(), self.receives.popleft()
            size, room = sent.buffer.numel(), received.buffer.numel()
            if size > room:
                received.error = TransportError(f"a message of {size} bytes does not fit the {room} that were posted")
            else:
                received.buffer[:size] = sent.buffer
            sent.done = received.done = True


def device_channel(channel: int) -> int:
    """Return the channel of the tensors whose headers have this one.

    >>> device_channel(7)
    -7
    """
    return -channel


CONTROL_CHANNEL = 0
WORD_BYTES = 64 * 2**10  # of a signal, a number, a name or an error
DOCUMENT_BYTES = 16 * 2**20  # of what ranks tell each other, an entry for each of them
JOB_BYTES = 256 * 2**20  # of a job, with the programs of a rank's stages as text
_BYTES_HEADER = struct.Struct("<QQ")  # length, checksum


def send_bytes(transport: Transport, data: bytes, to: int, channel: int = CONTROL_CHANNEL) -> None:
    """Send bytes of any length to a rank that calls `receive_bytes`, and wait until they are gone."""
    header = bytearray(_BYTES_HEADER.pack(len(data), zlib.crc32(data)))
    transport.send(torch.frombuffer(header, dtype=torch.uint8), to, channel).wait()
    if data:
        transport.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, channel).wait()


def receive_bytes(transport: Transport, source: int, channel: int = CONTROL_CHANNEL, *, limit: int) -> bytes:
    """Wait for the bytes of `send_bytes`; raises `TransportError` for more than `limit` and for damaged ones.

    `limit` is what the bytes are at most: nothing is allocated for an announcement of more.
    """
    header = torch.zeros(_BYTES_HEADER.size, dtype=torch.uint8)
    transport.receive(header, source, channel).wait()
    size, checksum = _BYTES_HEADER.unpack(header.numpy().tobytes())
    if size > limit:
        raise TransportError(f"rank {source} announced {size} bytes, beyond the limit of {limit}; try again")
    data = torch.zeros(size, dtype=torch.uint8)
    if size:
        transport.receive(data, source, channel).wait()
    received = data.numpy().tobytes()
    if zlib.crc32(received) != checksum:
        raise TransportError(f"{size} bytes from rank {source} are damaged; check the network and try again")
    return received


def send_tensor(transport: Transport, tensor: Tensor, to: int, channel: int = CONTROL_CHANNEL) -> None:
    """Send a tensor whose shape and dtype the receiver knows, from wherever it lies."""
    if tensor.numel():
        transport.send(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8), to, channel).wait()


def receive_tensor(transport: Transport, tensor: Tensor, source: int, channel: int = CONTROL_CHANNEL) -> None:
    """Fill a contiguous tensor, wherever it lies, with what `send_tensor` sent."""
    if tensor.numel():
        arriving = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
        transport.receive(arriving.reshape(-1).view(torch.uint8), source, channel).wait()
        if arriving is not tensor:
            tensor.copy_(arriving)
