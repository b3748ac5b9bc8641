"""One microbatch as one message: a fixed header, the layouts, then the tensors.

    0        magic, kind, number of sizes, index, bytes in all, bytes of the body, checksum
    64       the sizes of the microbatch, then the strides of every tensor, as int64
    aligned  the body (JSON; only control messages have one)
    aligned  tensor 0, aligned tensor 1, ...

Shapes do not travel: both sides know the tensors of a cut and work them out from the sizes. Nothing
that arrives is ever unpickled or evaluated.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.layout import aligned, num_payload_bytes, pack, unpack
from penstock.errors import TransportError
from penstock.graph.ops import Value

_MAGIC = 0x504E53544F434B31  # "PNSTOCK1"
_HEADER = struct.Struct("<QIIqQQq")
_LAYOUTS_AT = 64
BODY_BYTES = 64 * 1024

DATA, END, CLOSE = 1, 2, 3
_KINDS = {DATA: "data", END: "end", CLOSE: "close"}


@dataclass(slots=True)
class Message:
    """What crosses a cut: one microbatch, or word that the stream ends (END) or the stages stop (CLOSE)."""

    kind: int
    index: int = 0
    sizes: tuple[int, ...] = ()
    tensors: list[Tensor] = field(default_factory=list)
    body: bytes = b""

    def __str__(self) -> str:
        if self.kind == DATA:
            return f"microbatch {self.index}"
        return f"the end of a stream of {self.index}" if self.kind == END else "the word to stop"


class Format:
    """How messages across one cut lie in memory.

    Example:
        format = Format(cut.crossing, symbols=("batch",))
        buffer = torch.empty(format.largest({"batch": 4}), dtype=torch.uint8)
    """

    def __init__(self, values: Sequence[Value], symbols: Sequence[str]) -> None:
        self.values = tuple(values)
        self.symbols = tuple(symbols)
        self._num_strides = sum(len(value.shape) for value in values)
        self._numbers = struct.Struct(f"<{len(symbols) + self._num_strides}q")
        self._body_at = aligned(_LAYOUTS_AT + self._numbers.size)
        self._shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def largest(self, sizes: Mapping[str, int]) -> int:
        """Give the bytes of the largest message for microbatches up to these sizes."""
        payload = sum(aligned(value.num_bytes(sizes)) for value in self.values)
        return self._body_at + max(payload, BODY_BYTES)

    def write(self, message: Message, buffer: Tensor) -> int:
        """Lay a message out in a buffer and give the bytes it takes."""
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        body_end = aligned(self._body_at + len(message.body))
        self._fits(body_end, buffer)
        view[self._body_at : self._body_at + len(message.body)] = message.body
        view[self._body_at + len(message.body) : body_end] = bytes(body_end - self._body_at - len(message.body))
        offset = body_end
        strides: list[int] = []
        for tensor in message.tensors:
            num_bytes = num_payload_bytes(tensor.shape, tensor.stride(), tensor.dtype.itemsize)
            self._fits(offset + num_bytes, buffer)
            pack(tensor, buffer[offset : offset + num_bytes])
            padding = aligned(num_bytes) - num_bytes
            view[offset + num_bytes : offset + num_bytes + padding] = bytes(padding)
            strides += tensor.stride()
            offset += num_bytes + padding
        numbers = [*message.sizes, *strides]
        numbers += [0] * (len(self.symbols) + self._num_strides - len(numbers))
        self._numbers.pack_into(view, _LAYOUTS_AT, *numbers)
        end = _LAYOUTS_AT + self._numbers.size
        view[end : self._body_at] = bytes(self._body_at - end)
        _HEADER.pack_into(
            view, 0, _MAGIC, message.kind, len(message.tensors), message.index, offset, len(message.body), 0
        )
        view[_HEADER.size : _LAYOUTS_AT] = bytes(_LAYOUTS_AT - _HEADER.size)
        struct.pack_into("<q", view, _HEADER.size - 8, _checksum(buffer, offset))
        return offset

    def read(self, buffer: Tensor) -> Message:
        """Read a message; its tensors are views of the buffer. Raises `TransportError` for a damaged one."""
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        magic, kind, num_tensors, index, total, num_body, checksum = _HEADER.unpack_from(view, 0)
        if magic != _MAGIC or kind not in _KINDS or not self._body_at <= total <= buffer.numel() or total % 64:
            raise TransportError("a message is damaged: its header makes no sense; check the network and try again")
        struct.pack_into("<q", view, _HEADER.size - 8, 0)
        if _checksum(buffer, total) != checksum:
            raise TransportError(
                f"{_KINDS[kind]} message {index} is damaged: its checksum does not fit; check the network and try again"
            )
        body = bytes(view[self._body_at : self._body_at + num_body]) if num_body else b""
        message = Message(kind, index, body=body)
        if kind == DATA:
            try:
                self._read_tensors(message, num_tensors, view, buffer, aligned(self._body_at + num_body), total)
            except (RuntimeError, ValueError, OverflowError, ZeroDivisionError) as error:
                raise TransportError(f"message {index} is of another program: {error}; start again") from None
        return message

    def _read_tensors(
        self, message: Message, num_tensors: int, view: memoryview, buffer: Tensor, offset: int, total: int
    ) -> None:
        if num_tensors != len(self.values):
            raise TransportError(f"message {message.index} has {num_tensors} tensors, {len(self.values)} were expected")
        numbers = self._numbers.unpack_from(view, _LAYOUTS_AT)
        message.sizes = numbers[: len(self.symbols)]
        position = len(self.symbols)
        for value, shape in zip(self.values, self._evaluate(message.sizes), strict=True):
            strides = numbers[position : position + len(shape)]
            position += len(shape)
            num_bytes = num_payload_bytes(shape, strides, value.dtype.itemsize)
            if offset + num_bytes > total:
                raise TransportError(f"message {message.index} is too short for {value.name}")
            message.tensors.append(unpack(buffer[offset : offset + num_bytes], value.dtype, shape, strides))
            offset += aligned(num_bytes)

    def _evaluate(self, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        shapes = self._shapes.get(sizes)
        if shapes is None:
            named = dict(zip(self.symbols, sizes, strict=True))
            shapes = self._shapes[sizes] = [value.evaluate(named) for value in self.values]
        return shapes

    def _fits(self, end: int, buffer: Tensor) -> None:
        if end > buffer.numel():
            raise TransportError(
                f"a microbatch takes {end} bytes but the buffers hold {buffer.numel()}; "
                "give the pipeline the largest microbatch as its example"
            )


def _checksum(buffer: Tensor, num_bytes: int) -> int:
    """Add up 64-bit words: any single damaged word changes it, at the speed of memory."""
    return int(buffer[:num_bytes].view(torch.int64).sum())
