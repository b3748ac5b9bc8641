"""Weights in 4 or 8 bits by blocks of inputs, for ONNX Runtime's operator MatMulNBits, and weights in 16 bits."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.graph.ops import Op, Ref, effect
from penstock.packing import PACKINGS, read_packed

BLOCK = 32
PART_BYTES = 32 * 2**20  # weights of one model: while it is compiled, they are in memory three times
# accuracy levels of MatMulNBits: the fastest rounds inputs to 8 bits by blocks
IN_FLOATS, IN_8_BITS = 1, 4
# argument index of the weight: [O, I] in a linear layer, [I, O] in GPT-2's layers
_WEIGHTS = {"aten.linear.default": 1, "aten.addmm.default": 2}
_WITH_SHIFTS = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}
_AT_ONCE = 2**22  # elements rounded at a time, to limit temporary memory
_SAME_BITS = 16  # outputs
_WIDENED = 2**18  # elements of 16 bits that a product widens at a time: they stay in a processor's cache


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [O, I] in `bits` bits: with B blocks per row, values [O, B, bytes], scales and zeros per block.

    A number is `(value - zero) * scale`, plus the block's shift if there are `shifts` [O, B]. If it is several weights
    of one input, `rows` has the outputs of each.
    """

    bits: int
    shape: tuple[int, int]
    values: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any]
    block: int = BLOCK
    shifts: np.ndarray[Any, Any] | None = None
    accuracy: int = IN_8_BITS
    rows: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        shifts = 0 if self.shifts is None else self.shifts.nbytes
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes + shifts

    def blocks(self) -> "Blocks":
        """Return the blocks themselves."""
        return self

    def weight(self) -> Tensor:
        """Return the weight as float32."""
        count = self.values.shape[1]
        values = _unpacked(torch.from_numpy(self.values), self.bits).float()
        zeros = _unpacked(torch.from_numpy(self.zeros), self.bits)[:, :count].float()
        scales = torch.from_numpy(self.scales).view(-1, count, 1)
        whole = (values - zeros[..., None]) * scales
        if self.shifts is not None:
            whole = whole + torch.from_numpy(self.shifts)[..., None]
        return whole.flatten(1)[:, : self.shape[1]]


@dataclass(frozen=True, slots=True)
class Halves:
    """A weight in 16 bits, transposed, in parts [I, some outputs] that a product widens one after another."""

    parts: tuple[np.ndarray[Any, Any], ...]


def in_blocks(weight: Tensor, bits: int) -> Blocks:
    """Round a weight [O, I] to `bits` bits; each block of 32 inputs has its own scale and zero.

    >>> in_blocks(torch.tensor([[0.0, 0.5, 1.5]]), 4).weight().tolist()
    [[0.0, 0.5, 1.5]]

    A block's range includes its smallest and largest numbers and 0.
    """
    rows = max(1, _AT_ONCE // max(1, weight.shape[1]))
    with torch.no_grad():
        parts = [_rounded(part, bits) for part in weight.detach().float().split(rows)]
    values, scales, zeros = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
    return Blocks(bits, (weight.shape[0], weight.shape[1]), values, scales.reshape(-1), zeros)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as the bytes of its file, which become `Blocks` only while an engine is made."""

    raw: Tensor
    packing: str
    accuracy: int = IN_8_BITS
    rows: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.raw.nbytes

    def blocks(self) -> Blocks | Halves:
        """Return the same numbers in the engine's order.

        Integers with shifts are centred around a zero, so that inputs rounded to 8 bits weigh less.
        """
        form = PACKINGS[self.packing]
        if form.bits == 16:
            import ml_dtypes  # comes with onnx, without which sizes of weights are still counted

            kind = np.float16 if self.packing == "F16" else ml_dtypes.bfloat16
            numbers = self.raw.view(torch.int16)  # numpy has no bfloat16 of torch
            parts = numbers.split(max(1, _WIDENED // numbers.shape[1]))
            return Halves(tuple(part.t().contiguous().numpy().view(kind) for part in parts))
        rows, count = len(self.raw), self.raw.shape[1] // form.num_bytes * form.weights // form.block
        whole: list[Tensor] = []  # allocated once, since a table of words is large
        row = 0
        for part in read_packed(self.raw, self.packing):
            zero, scale, shifts = part.zero, part.scales, part.shifts
            if shifts is not None:
                zero = (form.most + 1) // 2
                shifts = shifts + zero * scale
            each = zero if isinstance(zero, Tensor) else torch.full(scale.shape, zero, dtype=torch.uint8)
            found = [_packed(part.values, form.bits), scale, _packed(each, form.bits)]
            found += [] if shifts is None else [shifts]
            whole = whole or [torch.empty(rows, *x.shape[1:], dtype=x.dtype) for x in found]
            for tensor, some in zip(whole, found, strict=True):
                tensor[row : row + len(some)] = some
            row += len(found[0])
        values, scales, zeros, *more = (tensor.numpy() for tensor in whole)
        return Blocks(
            form.bits,
            (rows, count * form.block),
            values,
            scales.reshape(-1),
            zeros,
            form.block,
            more[0] if more else None,
            self.accuracy,
            self.rows,
        )


def engine_bytes(packing: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of an engine's weight [O, I] in the blocks of a file, for inputs in 8 bits.

    A block has its integers, its scale, the sum of its weights and perhaps a shift, in float32; what the engine keeps
    beside these is mapped from a file, and the bytes of the model's file are released.

    >>> engine_bytes("Q4_K", (64, 512)), engine_bytes("Q6_K", (64, 512)), engine_bytes("F16", (64, 512))
    (28672, 49152, 65536)
    """
    form = PACKINGS[packing]
    num_weights = shape[0] * shape[1]
    if form.bits == 16:
        return 2 * num_weights
    return num_weights * form.bits // 8 + 4 * num_weights // form.block * (2 + (packing in _WITH_SHIFTS))


def pack(
    ops: Iterable[Op],
    tensors: Mapping[str, Tensor],
    bits: int | None,
    kept: Collection[str] = (),
    packings: Mapping[str, str] | None = None,
    accuracy: int = IN_8_BITS,
) -> dict[str, Blocks | StoredWeight]:
    """Return the rounded weights of linear layers by operation, except for operations in `kept`.

    Weights with an entry in `packings` are in the blocks of their file already.
    """
    found: dict[str, Blocks | StoredWeight] = {}
    made: dict[tuple[str, str], Blocks] = {}
    for op in ops:
        tensor = tensors.get(name) if (name := weight_of(op)) else None
        if name is not None and tensor is not None and (packing := (packings or {}).get(name)):
            if PACKINGS[packing].bits:
                found[op.name] = StoredWeight(tensor, packing, accuracy)
            continue
        if bits is None or name is None or tensor is None or op.name in kept:
            continue
        if tensor.dtype == torch.float32 and tensor.dim() == 2:
            key = name, op.target
            if key not in made:
                made[key] = in_blocks(tensor if _WEIGHTS[op.target] == 1 else tensor.t(), bits)
            found[op.name] = made[key]
    return found


def weight_of(op: Op) -> str | None:
    """Return the name of the weight that a linear layer multiplies with."""
    weight = op.arguments[_WEIGHTS[op.target]] if op.target in _WEIGHTS and not op.keywords else None
    return weight.name if isinstance(weight, Ref) else None


def products_of_one_input(
    ops: Iterable[Op], packed: Mapping[str, Blocks | StoredWeight]
) -> Mapping[tuple[str, ...], Blocks | StoredWeight]:
    """Return the weights of operations, in one weight where blocks with shifts multiply the same input.

    So the input is rounded, and summed by blocks, once. With inputs in 8 bits and a multiple of 16 outputs each, an
    output has the same bits as alone (`tests/runtime/test_blocks.py`), so that bits do not depend on the cuts.
    """
    groups: dict[Hashable, list[str]] = {}
    writes: Counter[str] = Counter()
    for op in ops:
        if (weight := packed.get(op.name)) is not None:
            given, form = op.arguments[_WEIGHTS[op.target] - 1], _form(weight)
            joins = form is not None and isinstance(given, Ref)
            groups.setdefault((given.name, writes[given.name], form) if joins else op.name, []).append(op.name)
        writes.update(effect(op).writes)
    return {tuple(names): _beside([packed[name] for name in names]) for names in groups.values()}


def _form(weight: Blocks | StoredWeight) -> Hashable:
    """Return what weights must share to become one; None for a weight that stays alone."""
    if not isinstance(weight, StoredWeight) or weight.packing not in _WITH_SHIFTS or weight.accuracy != IN_8_BITS:
        return None
    num_rows, num_bytes = weight.raw.shape
    return None if num_rows % _SAME_BITS else (weight.packing, num_bytes)


def _beside(weights: Sequence[Blocks | StoredWeight]) -> Blocks | StoredWeight:
    """Return weights of the same form as one, whose outputs follow each other."""
    first, raws = weights[0], [weight.raw for weight in weights if isinstance(weight, StoredWeight)]
    if len(raws) < 2 or not isinstance(first, StoredWeight):
        return first
    return replace(first, raw=torch.cat(raws), rows=tuple(map(len, raws)))


def _rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    most = 2**bits - 1
    blocks = functional.pad(weight, (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    least, largest = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
    scale = largest / most - least / most  # divide first, since the difference may overflow
    scale[scale == 0] = 1.0
    zero = (-least / scale).round().clamp(0, most)
    values = ((blocks / scale[..., None]).round() + zero[..., None]).clamp(0, most)
    return _packed(values.to(torch.uint8), bits), scale, _packed(zero.to(torch.uint8), bits)


def _packed(values: Tensor, bits: int) -> Tensor:
    """Put two numbers of 4 bits into a byte along the last dimension, the first in the lower half."""
    if bits == 8:
        return values
    values = functional.pad(values, (0, values.shape[-1] % 2))
    return values[..., ::2] | values[..., 1::2] << 4


def _unpacked(values: Tensor, bits: int) -> Tensor:
    return values if bits == 8 else torch.stack([values & 15, values >> 4], -1).flatten(-2)
