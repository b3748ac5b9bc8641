"""Message format of a microbatch: a fixed header, the layouts, then the tensors.

    0        magic, kind, program, number of tensors, index, total bytes, bytes of the body, bytes and sum apart,
             checksum
    64       the sizes of the microbatch, then the strides of every tensor, as int64
    aligned  the body (JSON; only control messages have one)
    aligned  tensor 0, aligned tensor 1, ...

Tensors sent from device to device are in a separate device buffer; the header has their bytes and checksum.

Shapes are not sent: both sides know the tensors of a cut and derive them from the sizes. Received data
is never unpickled or evaluated.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.errors import RunError, TransportError
from penstock.resources import allowed_bytes
from penstock.tensors import (
    ALIGNMENT,
    aligned,
    is_dense,
    num_payload_bytes,
    num_spread_bytes,
    place,
    stored_shape,
    sum_words,
    unpack,
)
from penstock.units import format_bytes
from penstock.values import Value

_MAGIC = 0x504E53544F434B32  # "PNSTOCK2"
_HEADER = struct.Struct("<QHHIqQQQqq")
_PROGRAM, _TOTAL, _APART = 2, 5, 7
_CHECKSUM = struct.Struct("<q")
_CHECKSUM_AT = _HEADER.size - _CHECKSUM.size
_LAYOUTS_AT = 64
BODY_BYTES = 64 * 1024
# A stream uses few buffers and two microbatch sizes: the usual one, and the last, which may be smaller.
_KEPT_LAYOUTS = 16

_T = TypeVar("_T")
_Key = TypeVar("_Key")

DATA, END, CLOSE = 1, 2, 3
_KINDS = {DATA: "data", END: "end", CLOSE: "close"}


@dataclass(slots=True)
class Message:
    """A message across a cut: one microbatch, the end of a stream (END) or a stop of the stages (CLOSE).

    `program` is the number of the stages' program that the microbatch runs; the driver chooses it.
    """

    kind: int
    index: int = 0
    sizes: tuple[int, ...] = ()
    tensors: list[Tensor] = field(default_factory=list)
    body: bytes = b""
    program: int = 0

    def __str__(self) -> str:
        if self.kind == DATA:
            return f"microbatch {self.index}"
        return f"the end of a stream of {self.index}" if self.kind == END else "the stop message"


@dataclass(frozen=True, slots=True)
class Laid:
    """The layout of one message in one buffer."""

    num_bytes: int
    view: memoryview
    head: bytes  # sizes and strides, with their padding
    paddings: list[slice]
    tensors: list[Tensor]
    stored: list[list[int] | None]  # the shape to copy if it differs from the tensor's
    words: Tensor
    apart: Tensor  # the used part of the tensors' separate buffer, if any


class Format:
    """The memory format of messages across one cut.

    Example:
        format = Format(cut.crossing, symbols=("batch",), sizes={"batch": 4})
        buffer = torch.empty(format.largest({"batch": 4}), dtype=torch.uint8)

    `sizes` are the sizes of the job's largest microbatch; messages that claim larger sizes are rejected.
    """

    def __init__(self, values: Sequence[Value], symbols: Sequence[str], sizes: Mapping[str, int]) -> None:
        self.values = tuple(values)
        self.symbols = tuple(symbols)
        self._sizes = tuple(sizes[symbol] for symbol in symbols)
        self._num_strides = sum(len(value.shape) for value in values)
        self._numbers = struct.Struct(f"<{len(symbols) + self._num_strides}q")
        self._body_at = aligned(_LAYOUTS_AT + self._numbers.size)
        self._largest_apart = self.largest_apart(sizes)[1]
        self._checked: dict[bytes, list[Layout]] = {}
        self._laid: dict[tuple[int, int, bytes], Laid] = {}
        self._arrived: dict[tuple[int, int, bytes], list[Tensor]] = {}

    def largest(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the largest message for microbatches up to these sizes."""
        payload = sum(aligned(value.num_bytes(sizes)) for value in self.values)
        return self._body_at + max(payload, BODY_BYTES)

    def largest_apart(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return the bytes of the largest message without its tensors, and the bytes of its tensors."""
        return self._body_at + BODY_BYTES, sum(aligned(value.num_bytes(sizes)) for value in self.values)

    def write(self, message: Message, buffer: Tensor, apart: Tensor | None = None) -> int:
        """Write a message whose tensors are on the host, as `lay` and `seal` do."""
        return self.seal(message, self.lay(message, buffer, apart))

    def lay(self, message: Message, buffer: Tensor, apart: Tensor | None = None) -> Laid:
        """Begin to write a message to a buffer, its tensors to `apart`, if given; `seal` ends it when they are copied.

        The same `buffer` must always come with the same `apart`; `apart_of` returns the bytes used there. Raises
        `RunError` for a tensor whose dtype differs from the program's, since the receiver would misread it.
        """
        for value, tensor in zip(self.values, message.tensors, strict=False):
            if tensor.dtype != value.dtype:
                raise RunError(
                    f"{value.name} is {tensor.dtype} but was captured as {value.dtype}: a setting of torch, such as "
                    "the default dtype or autocast, differs from the capture; create the pipeline with the same one"
                )
        numbers = self._write_numbers(message)
        laid = None if message.body else self._laid.get((buffer.data_ptr(), message.kind, numbers))
        if laid is None:
            laid = self._lay_out(message, numbers, buffer, apart)
        view = laid.view
        view[_HEADER.size : self._body_at] = laid.head
        view[self._body_at : self._body_at + len(message.body)] = message.body
        for padding in laid.paddings:
            view[padding] = bytes(padding.stop - padding.start)
        for target, shape, tensor in zip(laid.tensors, laid.stored, message.tensors, strict=True):
            source = tensor if shape is None else tensor.as_strided(shape, tensor.stride())
            # a conjugate that a GPU has only noted would be computed on the host before the copy has arrived there
            target.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)
        return laid

    def seal(self, message: Message, laid: Laid) -> int:
        """Write the checksums and header of a message whose tensors are copied; returns its bytes without `apart`."""
        num_apart = laid.apart.numel()
        _HEADER.pack_into(
            laid.view, 0, _MAGIC, message.kind, message.program, len(message.tensors), message.index, laid.num_bytes,
            len(message.body), num_apart, sum_words(laid.apart[:num_apart]) if num_apart else 0, 0,
        )  # fmt: skip
        _CHECKSUM.pack_into(laid.view, _CHECKSUM_AT, int(laid.words.sum()))
        return laid.num_bytes

    def _write_numbers(self, message: Message) -> bytes:
        numbers = list(message.sizes)
        for tensor in message.tensors:
            numbers += tensor.stride()
        numbers += [0] * (len(self.symbols) + self._num_strides - len(numbers))
        return self._numbers.pack(*numbers)

    def _lay_out(self, message: Message, numbers: bytes, buffer: Tensor, apart: Tensor | None) -> Laid:
        """Compute the layout of a message in this buffer; cached, since a stream repeats layouts."""
        body_end = aligned(self._body_at + len(message.body))
        self._fits(body_end, buffer)
        paddings = [slice(self._body_at + len(message.body), body_end)]
        targets: list[Tensor] = []
        shapes: list[list[int] | None] = []
        there, offset = (buffer, body_end) if apart is None else (apart, 0)
        for tensor in message.tensors:
            num_bytes = num_payload_bytes(tensor.shape, tensor.stride(), tensor.dtype.itemsize)
            self._fits(offset + num_bytes, there)
            target, shape = place(tensor, there[offset : offset + num_bytes])
            targets.append(target)
            shapes.append(shape)
            if apart is None:
                paddings.append(slice(offset + num_bytes, offset + aligned(num_bytes)))
            offset += aligned(num_bytes)
        num_host = offset if apart is None else body_end
        laid = Laid(
            num_bytes=num_host,
            view=memoryview(buffer.numpy()),  # type: ignore[arg-type]
            head=bytes(_LAYOUTS_AT - _HEADER.size) + numbers + bytes(self._body_at - _LAYOUTS_AT - len(numbers)),
            paddings=[padding for padding in paddings if padding.stop > padding.start],
            tensors=targets,
            stored=shapes,
            words=buffer[:num_host].view(torch.int64),
            apart=buffer[:0] if apart is None else apart[:offset],
        )
        if not message.body:
            _keep(self._laid, (buffer.data_ptr(), message.kind, numbers), laid)
        return laid

    def read(self, buffer: Tensor, fetch: Callable[[int], Tensor] | None = None) -> Message:
        """Read a message; its tensors are views of the buffer, or of the separate buffer that `fetch` returns.

        Raises `TransportError` for a damaged message.
        """
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        header = _HEADER.unpack_from(view, 0)
        magic, kind, program, num_tensors, index, total, num_body, num_apart, sum_apart, checksum = header
        known = magic == _MAGIC and kind in _KINDS
        if not known or not self._body_at + num_body <= total <= buffer.numel() or total % ALIGNMENT:
            raise TransportError("a message is damaged: invalid header; check the network and try again")
        _CHECKSUM.pack_into(view, _CHECKSUM_AT, 0)
        if sum_words(buffer[:total]) != checksum:
            raise TransportError(
                f"{_KINDS[kind]} message {index} is damaged: wrong checksum; check the network and try again"
            )
        body = bytes(view[self._body_at : self._body_at + num_body]) if num_body else b""
        message = Message(kind, index, body=body, program=program)
        if kind == DATA:
            there, begin, end = buffer, aligned(self._body_at + num_body), total
            if num_apart and fetch is not None:
                self._check_apart(index, num_apart)
                there, begin, end = fetch(num_apart), 0, num_apart
                if sum_words(there[:num_apart]) != sum_apart:
                    raise TransportError(f"the tensors of message {index} are damaged: wrong checksum; try again")
            try:
                self._read_tensors(message, num_tensors, view, there, begin, end)
            except (RuntimeError, ValueError, OverflowError, ZeroDivisionError) as error:
                raise TransportError(f"message {index} belongs to another program: {error}; start again") from None
        return message

    def _read_tensors(
        self, message: Message, num_tensors: int, view: memoryview, buffer: Tensor, offset: int, total: int
    ) -> None:
        if num_tensors != len(self.values):
            raise TransportError(f"message {message.index} has {num_tensors} tensors; expected {len(self.values)}")
        raw = bytes(view[_LAYOUTS_AT : _LAYOUTS_AT + self._numbers.size])
        message.sizes = self._numbers.unpack(raw)[: len(self.symbols)]
        key = (buffer.data_ptr(), total, raw)
        known = self._arrived.get(key)
        if known is not None:
            # a new view each time: an operation may change a tensor's shape in place
            message.tensors = [tensor.detach() for tensor in known]
            return
        layouts = self._checked.get(raw)
        if layouts is None:
            numbers = self._numbers.unpack(raw)
            layouts = check_layouts(message.index, self.values, self.symbols, self._sizes, numbers)
            _keep(self._checked, raw, layouts)
        lies_there = True
        for value, (shape, strides, num_bytes, in_place) in zip(self.values, layouts, strict=True):
            if offset + num_bytes > total:
                raise TransportError(f"message {message.index} is too short for {value.name}; start again")
            message.tensors.append(unpack(buffer[offset : offset + num_bytes], value.dtype, shape, strides))
            lies_there &= in_place
            offset += aligned(num_bytes)
        if lies_there:
            _keep(self._arrived, key, [tensor.detach() for tensor in message.tensors])

    def _check_apart(self, index: int, num_apart: int) -> None:
        if num_apart > self._largest_apart or num_apart % ALIGNMENT:
            raise TransportError(
                f"message {index} announces {num_apart} bytes of tensors, the job has at most {self._largest_apart}; "
                "start again with the same version everywhere"
            )

    def _fits(self, end: int, buffer: Tensor) -> None:
        if end > buffer.numel():
            raise TransportError(
                f"a microbatch takes {end} bytes but the buffers hold {buffer.numel()}; "
                "create the pipeline with the largest microbatch as its example"
            )


def program_of(buffer: Tensor) -> int:
    """Return the number of the program of the message in a buffer; arbitrary if it is damaged."""
    return int(_HEADER.unpack_from(memoryview(buffer.numpy()))[_PROGRAM])  # type: ignore[arg-type]


def size_of(buffer: Tensor) -> int:
    """Return the bytes of the message in a buffer, including tensors in a separate buffer."""
    header = _HEADER.unpack_from(memoryview(buffer.numpy()))  # type: ignore[arg-type]
    return int(header[_TOTAL]) + int(header[_APART])


def apart_of(buffer: Tensor) -> int:
    """Return the bytes of a message's tensors that are in a separate buffer."""
    return int(_HEADER.unpack_from(memoryview(buffer.numpy()))[_APART])  # type: ignore[arg-type]


def _keep(kept: dict[_Key, _T], key: _Key, item: _T) -> None:
    """Cache an item for the next equal message, and drop the oldest item."""
    if len(kept) >= _KEPT_LAYOUTS:
        kept.pop(next(iter(kept)))
    kept[key] = item


class Layout(NamedTuple):
    """A tensor's validated layout from a header; `in_place` is set if unpacking needs no separate memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    num_bytes: int
    in_place: bool


def check_layouts(
    index: int, values: Sequence[Value], symbols: Sequence[str], largest: Sequence[int], numbers: Sequence[int]
) -> list[Layout]:
    """Decode the layouts of a message's tensors from its numbers: sizes up to `largest`, then all strides.

    Raises `TransportError` for sizes beyond the job's, negative strides, and gaps too large for this process's memory.
    """
    for symbol, size, most in zip(symbols, numbers, largest, strict=False):
        if not 0 <= size <= most:
            raise TransportError(
                f"message {index} claims the size {size} for {symbol!r}, the job has at most {most}; "
                "create the pipeline with the largest microbatch as its example, and the same version everywhere"
            )
    sizes = dict(zip(symbols, numbers, strict=False))
    layouts: list[Layout] = []
    position, num_spread = len(symbols), 0
    for value in values:
        shape = value.evaluate(sizes)
        strides = tuple(numbers[position : position + len(shape)])
        position += len(shape)
        if any(stride < 0 for stride in strides):
            raise TransportError(f"message {index} claims a negative stride for {value.name}; start again")
        num_spread += num_spread_bytes(shape, strides, value.dtype.itemsize)
        num_bytes = num_payload_bytes(shape, strides, value.dtype.itemsize)
        layouts.append(Layout(shape, strides, num_bytes, is_dense(stored_shape(shape, strides), strides)))
    if num_spread and num_spread > (allowed := allowed_bytes()):
        raise TransportError(
            f"message {index} claims strides that take {format_bytes(num_spread)}, but this process may take "
            f"{format_bytes(allowed)}; cut the model at tensors without gaps"
        )
    return layouts
