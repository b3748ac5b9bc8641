"""Validation of a message's header against the job, before anything is allocated for it."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import TransportError
from penstock.memory import allowed_bytes
from penstock.tensors import is_dense, num_payload_bytes, num_spread_bytes, stored_shape
from penstock.units import format_bytes
from penstock.values import Value


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
