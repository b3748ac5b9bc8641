"""The interface between a process and the network.

Receives are posted before the message arrives, and sends return immediately; both return a `Pending`. A send is not
done before its receive has been posted. Messages between two ranks on one tag arrive in the order in which they were
sent. A message may be shorter than its posted buffer, never longer. Tags below 0 carry buffers on devices, if a
transport supports this (`transport/nccl.py`); receive and send must then have the same length.
"""

import contextlib
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.errors import TransportError

# Message tags between two ranks; messages with one tag are ordered, and independent of other tags:
#
#     0                     jobs, signals and tensors that both sides expect next
#     [1, 2**30]            links between stages: sets of 4,096, one set for each opening of channels
#     [2**30 + 1, 2**31)    documents exchanged in training, and gradients, by bucket
#
# Tag -t carries tensors from device to device; their headers have tag t.
CONTROL = 0
_LINKS_PER_SET, _NUM_SETS = 2**12, 2**18
_TRAINING_SETS = _NUM_SETS // 2
# in addition to links
DOCUMENTS = 2**30 + 1
BUFFERS = 2**30 + 2
OUTPUTS = 2**30 + 3
STATE = 2**30 + 4
CLOCK = 2**30 + 5
FEATURES = 2**30 + 6
LOADED = 2**30 + 7
ROWS = 2**30 + 8
INPUT_GRADIENTS = 2**30 + 9
_BUCKETS, _NUM_BUCKETS = 2**30 + 2**20, 2**29
SILENCE_S = 5.0  # a process that is silent for longer is declared lost
WORD_BYTES = 64 * 2**10  # limit for a signal, a number, a name or an error
DOCUMENT_BYTES = 16 * 2**20  # limit for an exchanged document, with an entry for each rank
JOB_BYTES = 256 * 2**20  # limit for a job, including the programs of a rank's stages as text
_BYTES_HEADER = struct.Struct("<QQ")  # length, checksum
_WITH_HEADER = 2**12  # up to this size data is sent in one message with its header
_POLL_S = 0.1
# after a failure: time for the watch function to raise the reason
_REASON_S = 6.0
T = TypeVar("T")


def link_tag(number: int, link: int) -> int:
    """Return the tag of a link in a set of channels.

    >>> link_tag(0, 0), link_tag(1, 3)
    (1, 4100)
    """
    return 1 + number % _NUM_SETS * _LINKS_PER_SET + link % _LINKS_PER_SET


def training_set(generation: int, *, evaluates: bool = False) -> int:
    """Return the number of the set of channels for training steps, or for evaluations during training.

    Streams use the number of their job, which counts from 0.
    """
    return _TRAINING_SETS + (2 * generation + evaluates) % _TRAINING_SETS


def bucket_tag(bucket: int) -> int:
    """Return the tag of a bucket of gradients."""
    return _BUCKETS + bucket % _NUM_BUCKETS


def device_tag(tag: int) -> int:
    """Return the device tag of the tensors whose headers have this tag.

    >>> device_tag(7)
    -7
    """
    return -tag


class Pending(Protocol):
    """A send or receive in flight."""

    def wait(self) -> None:
        """Block until it is done; raises `ConnectionBroken` if the connection is lost."""

    def is_done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""


class Transport(Protocol):
    """A transport of bytes between ranks; buffers are contiguous uint8 tensors that must not change until done."""

    rank: int
    size: int

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer without waiting."""

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for the next message on a tag."""

    def abort(self) -> None:
        """Make all current and later waits of this process raise `ConnectionBroken`."""

    def close(self) -> None:
        """Close all connections."""


def send_bytes(transport: Transport, data: bytes, to: int, tag: int = CONTROL) -> None:
    """Send bytes of any length to a rank that calls `receive_bytes`, and wait until they are sent."""
    post_bytes(transport, data, to, tag).wait()


def receive_bytes(transport: Transport, source: int, tag: int = CONTROL, *, limit: int) -> bytes:
    """Wait for the bytes of `send_bytes`; raises `TransportError` if there are more than `limit` or they are damaged.

    Nothing is allocated if a longer message is announced.
    """
    return ArrivingBytes(transport, source, tag, limit=limit).wait()


def post_bytes(transport: Transport, data: bytes, to: int, tag: int = CONTROL) -> Pending:
    """Start sending bytes as `send_bytes` does: the header with short data, or followed by a message of long data."""
    header = _BYTES_HEADER.pack(len(data), zlib.crc32(data))
    first, rest = header + data[:_WITH_HEADER], data[_WITH_HEADER:]
    buffers = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (first, rest) if part]
    return Together([transport.send(buffer, to, tag) for buffer in buffers], buffers)


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
    """Receive a tensor sent by `send_tensor` into a contiguous tensor on any device."""
    arriving, pending = post_receive(transport, tensor, source, tag)
    pending.wait()
    if arriving is not tensor:
        tensor.copy_(arriving)


def post_send(transport: Transport, tensor: Tensor, to: int, tag: int = CONTROL) -> Pending:
    """Start sending a tensor as `send_tensor` does; it must not change until the send is done."""
    if not tensor.numel():
        return Together()
    buffer = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Together([transport.send(buffer, to, tag)], [buffer])


def post_receive(transport: Transport, tensor: Tensor, source: int, tag: int = CONTROL) -> tuple[Tensor, Pending]:
    """Post a receive for `send_tensor`; returns the tensor that receives: the given one, or a buffer on the host."""
    if not tensor.numel():
        return tensor, Together()
    arriving = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
    return arriving, transport.receive(arriving.reshape(-1).view(torch.uint8), source, tag)


@dataclass(frozen=True, slots=True)
class Together:
    """Several sends, treated as one; it keeps their buffers until they are done."""

    pending: Sequence[Pending] = ()
    buffers: Sequence[Tensor] = ()

    def wait(self) -> None:
        """Block until all are done."""
        for each in self.pending:
            each.wait()

    def is_done(self) -> bool:
        """Return whether all are done."""
        return all(each.is_done() for each in self.pending)


class MeteredTransport:
    """A world's transport: a wrapper of the present group's transport that counts sent bytes and finished waits.

    `waits` is true while the thread `owner`, at first the one that created this, waits for a message or is within
    `waiting`. It lasts as long as the process: `inner` is replaced if another group forms.

    Example:
        transport = MeteredTransport(ZmqTransport(...))
        ...
        print(transport.sent_bytes)
    """

    def __init__(self, inner: Transport) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.sent_bytes = 0
        self.num_moved = 0
        self.waits = False
        self.owner = threading.get_ident()
        self._counting = threading.Lock()
        self.inner = inner

    def become(self, inner: Transport) -> None:
        """Send and receive by another transport, as that of the next group."""
        self.rank, self.size, self.inner = inner.rank, inner.size, inner

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer and count it."""
        with self._counting:
            self.sent_bytes += buffer.nbytes
        return _MeteredPending(self, self.inner.send(buffer, to, tag))

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for the next message on a tag."""
        return _MeteredPending(self, self.inner.receive(buffer, source, tag))

    def abort(self) -> None:
        """End every wait of this process."""
        self.inner.abort()

    def close(self) -> None:
        """Close all connections."""
        self.inner.close()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the owner as waiting, if it is the caller; the end counts as progress."""
        owner = threading.get_ident() == self.owner
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

    def is_done(self) -> bool:
        return self._inner.is_done()


class StoreSilent(RuntimeError):  # noqa: N818 -- named after the state
    """A store has not answered in time."""


def run_watched(
    function: Callable[[], T], watch: Callable[[], None], deadline_s: float, *, poll_s: float = _POLL_S
) -> T:
    """Call a blocking function on a separate thread, and meanwhile poll `watch`, which may raise an error.

    Raises the function's error, unless `watch` raises a better reason; and `StoreSilent` if the function has not
    returned by the deadline, when the thread is abandoned.
    """
    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    ends_s = time.monotonic() + deadline_s

    threading.Thread(target=_run, args=(function, ended), name="penstock-connect", daemon=True).start()
    while True:
        try:
            result, error = ended.get(timeout=poll_s)
        except queue.Empty:
            watch()
            if time.monotonic() > ends_s:
                raise StoreSilent(f"no answer for {deadline_s:g} s") from None
            continue
        if error is not None:
            deadline = time.monotonic() + _REASON_S
            while isinstance(error, RuntimeError) and time.monotonic() < deadline:
                watch()
                time.sleep(poll_s)
            raise error
        found: T = result
        return found


def _run(function: Callable[[], Any], ended: "queue.SimpleQueue[tuple[Any, BaseException | None]]") -> None:
    try:
        ended.put((function(), None))
    except BaseException as error:
        ended.put((None, error))
    finally:
        # the error refers to this frame: a reference cycle through the queue would keep the function's sockets open
        del function, ended
