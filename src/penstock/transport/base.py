"""The interface between a process and the network: four methods.

Receives are posted before the message arrives, sends return immediately; both return a `Pending`. A send is
done when a receive has been posted for it, at the earliest. Messages between two ranks on one
tag arrive in the order they were sent. A message may be shorter than the buffer that was posted
for it, never longer. Tags below 0 carry buffers on devices, if a transport supports them
(`transport/nccl.py`): such a receive must have the length of its send.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.transport.tags import CONTROL


class Pending(Protocol):
    """A send or receive in flight."""

    def wait(self) -> None:
        """Block until it is done; raises `ConnectionBroken` if the connection is lost."""


class Transport(Protocol):
    """A transport of bytes between ranks; buffers are contiguous uint8 tensors that must not change until done."""

    rank: int
    size: int

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer without waiting."""

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for the next message on a tag."""

    def abort(self) -> None:
        """End every wait of this process with `ConnectionBroken`, now and later."""

    def close(self) -> None:
        """Close all connections."""


SILENCE_S = 5.0  # after which a silent process is declared lost
WORD_BYTES = 64 * 2**10  # of a signal, a number, a name or an error
DOCUMENT_BYTES = 16 * 2**20  # of an exchanged document, with an entry for each rank
JOB_BYTES = 256 * 2**20  # of a job, including the programs of a rank's stages as text
_BYTES_HEADER = struct.Struct("<QQ")  # length, checksum
_WITH_HEADER = 2**12  # bytes sent in one message with their header


def send_bytes(transport: Transport, data: bytes, to: int, tag: int = CONTROL) -> None:
    """Send bytes of any length to a rank that calls `receive_bytes`, and wait until they are sent."""
    post_bytes(transport, data, to, tag).wait()


def receive_bytes(transport: Transport, source: int, tag: int = CONTROL, *, limit: int) -> bytes:
    """Wait for the bytes of `send_bytes`; raises `TransportError` for more than `limit` and for damaged ones.

    `limit` is the maximum length: nothing is allocated for an announcement of more.
    """
    return ArrivingBytes(transport, source, tag, limit=limit).wait()


def post_bytes(transport: Transport, data: bytes, to: int, tag: int = CONTROL) -> Pending:
    """Start sending bytes as `send_bytes` does: a short message with its header, the rest of a long one after it."""
    header = _BYTES_HEADER.pack(len(data), zlib.crc32(data))
    first, rest = header + data[:_WITH_HEADER], data[_WITH_HEADER:]
    buffers = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (first, rest) if part]
    return _Together([_Kept(buffer, transport.send(buffer, to, tag)) for buffer in buffers])


class ArrivingBytes:
    """A posted receive for the bytes of `send_bytes`; `wait` returns them as `receive_bytes` does.

    Example:
        arriving = {rank: ArrivingBytes(transport, rank, limit=WORD_BYTES) for rank in (1, 2)}
        words = {rank: each.wait() for rank, each in arriving.items()}
    """

    def __init__(self, transport: Transport, source: int, tag: int = CONTROL, *, limit: int) -> None:
        self._transport, self._source, self._tag, self._limit = transport, source, tag, limit
        self._first = torch.zeros(_BYTES_HEADER.size + _WITH_HEADER, dtype=torch.uint8)
        self._pending = transport.receive(self._first, source, tag)

    def wait(self) -> bytes:
        """Wait for all bytes and return them."""
        self._pending.wait()
        source, first = self._source, self._first.numpy().tobytes()
        size, checksum = _BYTES_HEADER.unpack_from(first)
        if size > self._limit:
            raise TransportError(f"rank {source} announced {size} bytes, beyond the limit of {self._limit}; try again")
        received = first[_BYTES_HEADER.size : _BYTES_HEADER.size + size]
        if size > _WITH_HEADER:
            rest = torch.zeros(size - _WITH_HEADER, dtype=torch.uint8)
            self._transport.receive(rest, source, self._tag).wait()
            received += rest.numpy().tobytes()
        if zlib.crc32(received) != checksum:
            raise TransportError(f"{size} bytes from rank {source} are damaged; check the network and try again")
        return received


def send_tensor(transport: Transport, tensor: Tensor, to: int, tag: int = CONTROL) -> None:
    """Send a tensor on any device; the receiver must know its shape and dtype."""
    post_send(transport, tensor, to, tag).wait()


def receive_tensor(transport: Transport, tensor: Tensor, source: int, tag: int = CONTROL) -> None:
    """Receive a tensor of `send_tensor` into a contiguous tensor on any device."""
    arriving, pending = post_receive(transport, tensor, source, tag)
    pending.wait()
    if arriving is not tensor:
        tensor.copy_(arriving)


def post_send(transport: Transport, tensor: Tensor, to: int, tag: int = CONTROL) -> Pending:
    """Start sending a tensor as `send_tensor` does; it must not change until the send is done."""
    if not tensor.numel():
        return _Kept(tensor, None)
    buffer = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _Kept(buffer, transport.send(buffer, to, tag))


def post_receive(transport: Transport, tensor: Tensor, source: int, tag: int = CONTROL) -> tuple[Tensor, Pending]:
    """Post a contiguous tensor for `send_tensor`; returns the receiving tensor: itself, or one on the host."""
    if not tensor.numel():
        return tensor, _Kept(tensor, None)
    arriving = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
    return arriving, transport.receive(arriving.reshape(-1).view(torch.uint8), source, tag)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A send whose buffer stays alive until it is done; without `pending` nothing was sent."""

    buffer: Tensor
    pending: Pending | None

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()


@dataclass(frozen=True, slots=True)
class _Together:
    """Several sends, treated as one."""

    pending: Sequence[Pending]

    def wait(self) -> None:
        for each in self.pending:
            each.wait()
