"""Weights in the bits of their file: blocks of integers, each with a scale, and a shift or a zero point.

    Q4_0, Q5_0, Q8_0            integer * scale
    Q4_1, Q5_1                  integer * scale + shift
    Q4_K, Q5_K, Q6_K            the same in blocks of 32 or 16, whose scales and shifts share two floats per 256 weights
    U4_32, U8_128, ...          (integer - zero point) * scale, in blocks of 32, 64 or 128
    F8_128                      float of 8 bits * scale
    F16, BF16                   float of 16 bits

Layouts with Q, F16 and BF16 are those of ggml (`block_q4_0` and the others in ggml-common.h). Others are for quantized
safetensors: a scale in float32, a zero point of a byte (not for F8), and the numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_AT_ONCE = 2**18  # weights unpacked at a time, to limit temporary memory


class Integers(NamedTuple):
    """Rows of a weight: numbers [O, B, block] of at most 16 bits, less `zero`, times scales [O, B], plus shifts."""

    values: Tensor
    zero: int | Tensor
    scales: Tensor
    shifts: Tensor | None

    def floats(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        zero = self.zero[..., None] if isinstance(self.zero, Tensor) else self.zero
        whole = (self.values.float() - zero) * self.scales[..., None]
        return (whole if self.shifts is None else whole + self.shifts[..., None]).flatten(1)


class Packing(NamedTuple):
    """A block format: `weights` of them take `num_bytes`; integers up to `most` by blocks of `block` inputs.

    Products hold the numbers in `bits` bits; 0 if the engine has no such products, 16 if the numbers are floats.
    """

    weights: int
    num_bytes: int
    most: int
    bits: int
    block: int
    read: Callable[[Tensor], Integers]


def is_packable(shape: Sequence[object], packing: str) -> bool:
    """Return whether a weight of this shape has whole blocks in each row.

    >>> is_packable((8, 512), "Q4_K"), is_packable((8, 32), "Q4_K"), is_packable((8, 32), "Q2_K")
    (True, False, False)
    """
    inputs = shape[1] if len(shape) == 2 and packing in PACKINGS else None
    return isinstance(inputs, int) and inputs > 0 and inputs % PACKINGS[packing].weights == 0


def packed_shape(packing: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a weight's bytes.

    >>> packed_shape("Q4_K", (8, 512))
    (8, 288)
    """
    rows, inputs = shape
    form = PACKINGS[packing]
    return rows, inputs // form.weights * form.num_bytes


def read_packed(raw: Tensor, packing: str) -> Iterator[Integers]:
    """Yield the integers of a weight's bytes [O, bytes], some rows at a time."""
    form = PACKINGS[packing]
    row = raw.shape[1] // form.num_bytes * form.weights
    for part in raw.split(max(1, _AT_ONCE // max(1, row))):
        yield form.read(part.unflatten(1, (-1, form.num_bytes)))


def unpacked(raw: Tensor, packing: str) -> Tensor:
    """Return a weight in float32; of GGUF with the bits that `gguf.dequantize` gives."""
    form = PACKINGS[packing]
    made = torch.empty(raw.shape[0], raw.shape[1] // form.num_bytes * form.weights)
    row = 0
    for part in read_packed(raw, packing):
        made[row : row + len(part.values)] = part.floats()
        row += len(part.values)
    return made


def packed_blocks(values: Tensor, zeros: Tensor, scales: Tensor, packing: str) -> Tensor:
    """Return the bytes [O, bytes] of a weight in one of the formats with U or F, from what `Integers` has of it.

    >>> ones = torch.ones(1, 1, 32, dtype=torch.uint8)
    >>> unpacked(packed_blocks(ones, torch.tensor([[3]]), torch.tensor([[0.5]]), "U4_32"), "U4_32")[0, :2]
    tensor([-1., -1.])
    """
    form = PACKINGS[packing]
    half = form.block // 2
    parts = [values[..., :half] | values[..., half:] << 4 if form.bits == 4 else values.view(torch.uint8)]
    if form.bits:
        parts.insert(0, zeros[..., None].to(torch.uint8))
    return torch.cat([bytes_of(scales), *parts], -1).flatten(1)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of each element, in a further dimension.

    >>> bytes_of(torch.tensor([258], dtype=torch.int32))
    tensor([[2, 1, 0, 0]], dtype=torch.uint8)
    """
    # `contiguous` leaves the strides of dimensions of one element, and `view` refuses some
    return tensor.clone(memory_format=torch.contiguous_format)[..., None].view(torch.uint8)


def _floats(raw: Tensor, at: int) -> Tensor:
    """Return the half-precision numbers at a position of each block, as float32."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _halves(raw: Tensor) -> Tensor:
    """Return the lower halves of all bytes, then the upper halves."""
    return torch.cat([raw & 15, raw >> 4], -1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return the bits of 4 bytes as 32 numbers, each 0 or 16."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q4_0(raw: Tensor) -> Integers:
    return Integers(_halves(raw[..., 2:]), 8, _floats(raw, 0), None)


def _q4_1(raw: Tensor) -> Integers:
    return Integers(_halves(raw[..., 4:]), 0, _floats(raw, 0), _floats(raw, 2))


def _q5_0(raw: Tensor) -> Integers:
    return Integers(_halves(raw[..., 6:]) | _fifth_bits(raw[..., 2:6]), 16, _floats(raw, 0), None)


def _q5_1(raw: Tensor) -> Integers:
    return Integers(_halves(raw[..., 8:]) | _fifth_bits(raw[..., 4:8]), 0, _floats(raw, 0), _floats(raw, 2))


def _q8_0(raw: Tensor) -> Integers:
    return Integers(raw[..., 2:] ^ 128, 128, _floats(raw, 0), None)  # a signed byte plus 128


def _scales_of_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and shifts of the 8 blocks of 32 in each 256 weights: 6 bits each, in 12 bytes."""
    low, middle, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat([low & 63, high & 15 | (low >> 6) << 4], -1)
    shifts = torch.cat([middle & 63, high >> 4 | (middle >> 6) << 4], -1)
    wide = ((_floats(raw, at)[..., None] * each.float()).flatten(1) for at, each in ((0, scales), (2, shifts)))
    scale, shift = wide
    return scale, -shift


def _q4_k(raw: Tensor) -> Integers:
    values = _halves(raw[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    return Integers(values.flatten(1, 3), 0, *_scales_of_k(raw))


def _q5_k(raw: Tensor) -> Integers:
    values = _halves(raw[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    fifth = raw[..., 16:48][:, :, None] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return Integers((values | fifth << 4).flatten(1, 2), 0, *_scales_of_k(raw))


def _q6_k(raw: Tensor) -> Integers:
    low = _halves(raw[..., :128].unflatten(-1, (2, 64)))
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    values = (low | high.flatten(-2) << 4).unflatten(-1, (8, 16)).flatten(1, 3)
    scales = raw[..., 192:208].view(torch.int8).float() * _floats(raw, 208)[..., None]
    return Integers(values, 32, scales.flatten(1), None)


def _scales(raw: Tensor) -> Tensor:
    return raw[..., :4].clone(memory_format=torch.contiguous_format).view(torch.float32).squeeze(-1)


def _u4(raw: Tensor) -> Integers:
    return Integers(_halves(raw[..., 5:]), raw[..., 4], _scales(raw), None)


def _u8(raw: Tensor) -> Integers:
    return Integers(raw[..., 5:], raw[..., 4], _scales(raw), None)


def _f8(raw: Tensor) -> Integers:
    return Integers(raw[..., 4:].contiguous().view(torch.float8_e4m3fn), 0, _scales(raw), None)


def _f16(raw: Tensor) -> Integers:
    return Integers(raw.contiguous().view(torch.float16), 0, torch.ones(1, 1), None)


def _bf16(raw: Tensor) -> Integers:
    return Integers(raw.contiguous().view(torch.bfloat16), 0, torch.ones(1, 1), None)


PACKINGS: Mapping[str, Packing] = {
    "Q4_0": Packing(32, 18, 15, 4, 32, _q4_0),
    "Q4_1": Packing(32, 20, 15, 4, 32, _q4_1),
    "Q5_0": Packing(32, 22, 31, 8, 32, _q5_0),
    "Q5_1": Packing(32, 24, 31, 8, 32, _q5_1),
    "Q8_0": Packing(32, 34, 255, 8, 32, _q8_0),
    "Q4_K": Packing(256, 144, 15, 4, 32, _q4_k),
    "Q5_K": Packing(256, 176, 31, 8, 32, _q5_k),
    "Q6_K": Packing(256, 210, 63, 8, 16, _q6_k),
    **{f"U4_{block}": Packing(block, 5 + block // 2, 15, 4, block, _u4) for block in (32, 64, 128)},
    **{f"U8_{block}": Packing(block, 5 + block, 255, 8, block, _u8) for block in (32, 64, 128)},
    "F8_128": Packing(128, 132, 0, 0, 128, _f8),
    "F16": Packing(1, 2, 0, 16, 1, _f16),
    "BF16": Packing(1, 2, 0, 16, 1, _bf16),
}
