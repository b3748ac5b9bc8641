"""Print the counted bytes of an engine of weights in blocks, and what this process holds more with it."""

import gc
import sys

import torch

from penstock.resources import anonymous_bytes, release_freed
from penstock.runtime.onnx.blocks import StoredWeight, engine_bytes
from penstock.runtime.onnx.exported import Engine
from penstock.runtime.onnx.onnx_nodes import Arrays, Made, Nodes
from penstock.runtime.onnx.onnx_runtime import compile_model
from tests.test_packing import raw_weight

_OUTPUTS, _INPUTS, _COUNT = 4096, 2048, 4


def made(packing: str) -> Engine:
    """Make an engine of different weights."""
    apart: Arrays = {}
    raws = [raw_weight(packing, _OUTPUTS, _INPUTS, 0.001).roll(number, 0) for number in range(_COUNT)]
    nodes = Nodes(packed={(str(n),): StoredWeight(raw, packing).blocks() for n, raw in enumerate(raws)}, apart=apart)
    given, products = Made(nodes, torch.float32, (1, _INPUTS), known_as="x"), []
    for (name,) in nodes.packed:
        nodes.operation = name
        products.append(Made(nodes, torch.float32, (1, _OUTPUTS), known_as=nodes.packed_product(given)))
    return compile_model(nodes.model([given], products), apart)


def held() -> int:
    """Return this process's anonymous memory, without what was freed."""
    gc.collect()
    release_freed()
    return anonymous_bytes() or 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm = made("Q8_0")  # the engine's own memory
    del warm
    before = held()
    engine = made(sys.argv[1])
    engine({"x": torch.randn(1, _INPUTS).numpy()})
    print(_COUNT * engine_bytes(sys.argv[1], (_OUTPUTS, _INPUTS)), held() - before)
