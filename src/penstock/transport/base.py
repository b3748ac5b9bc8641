"""The seam between a process and the network: four methods.

Receives are posted before the message comes, sends return at once; both give a `Pending`. A send is
done when a receive has been posted for it, at the earliest. Messages between two ranks on one
tag arrive in the order they were sent. A message may be shorter than the buffer that was posted
for it, never longer. Tags below 0 carry buffers on devices, where a transport has a way for them
(`transport/nccl.py`): there a receive is as long as what is sent.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.tracing.record import FEEDER as FEEDER
from penstock.transport.tags import CONTROL


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Block until it is done; raises `ConnectionBroken` when the connection is gone."""


class Transport(Protocol):
    """Moves bytes between ranks; buffers are contiguous uint8 tensors that stay untouched until done."""

    rank: int
    size: int

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer without waiting."""

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for the next message on a tag."""

    def abort(self) -> None:
        """End every wait of this process with `ConnectionBroken`, now and from now on."""

    def close(self) -> None:
        """Let go of all connections."""


WORD_BYTES = 64 * 2**10  # of a signal, a number, a name or an error
DOCUMENT_BYTES = 16 * 2**20  # of what ranks tell each other, an entry for each of them
JOB_BYTES = 256 * 2**20  # of a job, with the programs of a rank's stages as text
_BYTES_HEADER = struct.Struct("<QQ")  # length, checksum


def send_bytes(transport: Transport, data: bytes, to: int, tag: int = CONTROL) -> None:
    """Send bytes of any length to a rank that calls `receive_bytes`, and wait until they are gone."""
    header = bytearray(_BYTES_HEADER.pack(len(data), zlib.crc32(data)))
    transport.send(torch.frombuffer(header, dtype=torch.uint8), to, tag).wait()
    if data:
        transport.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, tag).wait()


def receive_bytes(transport: Transport, source: int, tag: int = CONTROL, *, limit: int) -> bytes:
    """Wait for the bytes of `send_bytes`; raises `TransportError` for more than `limit` and for damaged ones.

    `limit` is what the bytes are at most: nothing is allocated for an announcement of more.
    """
    header = torch.zeros(_BYTES_HEADER.size, dtype=torch.uint8)
    transport.receive(header, source, tag).wait()
    size, checksum = _BYTES_HEADER.unpack(header.numpy().tobytes())
    if size > limit:
        raise TransportError(f"rank {source} announced {size} bytes, beyond the limit of {limit}; try again")
    data = torch.zeros(size, dtype=torch.uint8)
    if size:
        transport.receive(data, source, tag).wait()
    received = data.numpy().tobytes()
    if zlib.crc32(received) != checksum:
        raise TransportError(f"{size} bytes from rank {source} are damaged; check the network and try again")
    return received


def send_tensor(transport: Transport, tensor: Tensor, to: int, tag: int = CONTROL) -> None:
    """Send a tensor whose shape and dtype the receiver knows, from wherever it lies."""
    post_send(transport, tensor, to, tag).wait()


def receive_tensor(transport: Transport, tensor: Tensor, source: int, tag: int = CONTROL) -> None:
    """Fill a contiguous tensor, wherever it lies, with what `send_tensor` sent."""
    arriving, pending = post_receive(transport, tensor, source, tag)
    pending.wait()
    if arriving is not tensor:
        tensor.copy_(arriving)


def post_send(transport: Transport, tensor: Tensor, to: int, tag: int = CONTROL) -> Pending:
    """Begin to send a tensor as `send_tensor` does; it stays untouched until that is done."""
    if not tensor.numel():
        return _Kept(tensor, None)
    buffer = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _Kept(buffer, transport.send(buffer, to, tag))


def post_receive(transport: Transport, tensor: Tensor, source: int, tag: int = CONTROL) -> tuple[Tensor, Pending]:
    """Post a contiguous tensor for what `send_tensor` sends; returns where it arrives: itself, or one on the host."""
    if not tensor.numel():
        return tensor, _Kept(tensor, None)
    arriving = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
    return arriving, transport.receive(arriving.reshape(-1).view(torch.uint8), source, tag)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A send whose buffer stays alive until it is done; nothing was sent where there is no `pending`."""

    buffer: Tensor
    pending: Pending | None

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
