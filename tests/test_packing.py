"""Weights in the blocks of files; of GGUF with the numbers of the `gguf` package, bit by bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.packing import PACKINGS, is_packable, packed_shape, unpacked

# where a block has its floats: in half precision, or in float32 at its beginning
_FLOATS = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
           "Q6_K": [208]}  # fmt: skip
_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


def raw_weight(packing: str, rows: int, inputs: int, scale: float = 1.0) -> Tensor:
    """Return random blocks, with scales that are numbers."""
    form = PACKINGS[packing]
    generator = np.random.default_rng(rows + inputs)
    if packing in _HALVES:
        numbers = torch.from_numpy(scale * generator.normal(size=(rows, inputs)))
        return numbers.to(_HALVES[packing]).view(torch.uint8)
    raw = generator.integers(0, 256, packed_shape(packing, (rows, inputs)), dtype=np.uint8)
    blocks = raw.reshape(rows, -1, form.num_bytes)
    for at in _FLOATS.get(packing, [0]):
        kind: type = np.float16 if packing in _FLOATS else np.float32
        floats = (scale * generator.normal(size=blocks.shape[:2])).astype(kind)[..., None].view(np.uint8)
        blocks[..., at : at + floats.shape[-1]] = floats
    if packing.startswith("U4"):
        blocks[..., 4] &= 15
    return torch.from_numpy(raw)


@pytest.mark.parametrize("packing", [*_FLOATS, *_HALVES])
def test_numbers_are_those_of_gguf(packing: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[packing]
    assert gguf.GGML_QUANT_SIZES[kind] == (PACKINGS[packing].weights, PACKINGS[packing].num_bytes)
    raw = raw_weight(packing, 7, 768)
    found = unpacked(raw, packing)
    assert is_packable(found.shape, packing)
    assert np.array_equal(found.numpy(), gguf.dequantize(raw.numpy(), kind))
