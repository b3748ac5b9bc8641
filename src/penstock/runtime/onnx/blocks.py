"""Weights in 4 or 8 bits by blocks of 32 inputs, in the format of ONNX Runtime's operator MatMulNBits."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.graph.ops import Op, Ref

BLOCK = 32
# argument index of the weight: [O, I] in a linear layer, [I, O] in GPT-2's layers
_WEIGHTS = {"aten.linear.default": 1, "aten.addmm.default": 2}
_AT_ONCE = 2**22  # elements rounded at a time, to limit temporary memory


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [O, I] in `bits` bits: with B blocks per row, values [O, B, 4 * bits], scales and zeros per block.

    A number is `(value - zero) * scale`.
    """

    bits: int
    shape: tuple[int, int]
    values: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes

    def weight(self) -> Tensor:
        """Return the weight as float32."""
        count = self.values.shape[1]
        values = _unpacked(torch.from_numpy(self.values), self.bits).float()
        zeros = _unpacked(torch.from_numpy(self.zeros), self.bits)[:, :count].float()
        scales = torch.from_numpy(self.scales).view(-1, count, 1)
        return ((values - zeros[..., None]) * scales).flatten(1)[:, : self.shape[1]]


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


def pack(
    ops: Iterable[Op], tensors: Mapping[str, Tensor], bits: int | None, kept: Collection[str] = ()
) -> dict[str, Blocks]:
    """Return the rounded weights of linear layers by operation, except for operations in `kept`."""
    found: dict[str, Blocks] = {}
    made: dict[tuple[str, str], Blocks] = {}
    for op in ops:
        tensor = tensors.get(name) if (name := weight_of(op)) else None
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
