"""Weights in blocks: what was rounded is near, and the engine multiplies with the same numbers."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.graph.ops import Op, Ref
from penstock.packing import PACKINGS, unpacked
from penstock.runtime.onnx.blocks import (
    BLOCK,
    IN_FLOATS,
    Blocks,
    Halves,
    StoredWeight,
    in_blocks,
    products_of_one_input,
)
from penstock.runtime.onnx.onnx_nodes import Made, Nodes
from penstock.runtime.onnx.onnx_runtime import compile_model
from tests.fewer import examples, first
from tests.test_packing import raw_weight


@settings(max_examples=examples(30))
@given(st.integers(1, 40), st.integers(1, 100), st.sampled_from([4, 8]), st.integers(0, 2**31))
def test_each_block_is_within_half_a_step(rows: int, width: int, bits: int, seed: int) -> None:
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    found = in_blocks(weight, bits).weight()
    for begin in range(0, width, BLOCK):
        part, near = weight[:, begin : begin + BLOCK], found[:, begin : begin + BLOCK]
        step = (part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)) / (2**bits - 1)
        assert bool(((part - near).abs().amax(1) <= step * 1.001 + 1e-7).all())  # half for the zero, half for itself


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(7, 96), (64, 32), (5, 40)])
def test_the_engine_multiplies_with_these_numbers(bits: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    blocks, inputs = in_blocks(torch.randn(shape), bits), torch.randn(3, shape[1])
    assert error_of(blocks, inputs, blocks.weight()) < 0.02  # inputs are rounded to 8 bits


def error_of(blocks: Blocks | Halves, inputs: Tensor, weight: Tensor) -> float:
    """Multiply in ONNX Runtime; return the largest error relative to the largest product."""
    nodes = Nodes(packed={("linear",): blocks}, operation="linear")
    given = Made(nodes, torch.float32, tuple(inputs.shape), known_as="inputs")
    product = nodes.packed_product(given)
    model = nodes.model([given], [Made(nodes, torch.float32, (*inputs.shape[:-1], len(weight)), known_as=product)])
    (found,) = compile_model(model)({"inputs": inputs.numpy()})
    wanted = (inputs @ weight.t()).numpy()
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("packing", [packing for packing, form in PACKINGS.items() if form.bits])
@pytest.mark.parametrize("rows", [(3,), (2, 5)])
def test_products_in_the_blocks_of_a_file(packing: str, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    raw = raw_weight(packing, 20, 512)
    weight, inputs = unpacked(raw, packing), torch.randn(*rows, 512)
    blocks = StoredWeight(raw, packing).blocks()
    # with shifts, the same numbers come from integers around another zero
    if isinstance(blocks, Blocks):
        assert torch.allclose(blocks.weight(), weight, rtol=0, atol=1e-6 * float(weight.abs().max()))
    assert error_of(StoredWeight(raw, packing, IN_FLOATS).blocks(), inputs, weight) < 1e-5
    assert error_of(blocks, inputs, weight) < 0.02


@pytest.mark.parametrize("packing", ["F16", "BF16"])
def test_halves_are_multiplied_in_parts(packing: str) -> None:
    raw, inputs = raw_weight(packing, 300, 2048), torch.randn(3, 2048)
    halves = StoredWeight(raw, packing).blocks()
    assert isinstance(halves, Halves)
    assert len(halves.parts) > 1
    assert error_of(halves, inputs, unpacked(raw, packing)) < 1e-5


@pytest.mark.parametrize("packing", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_products_of_one_input_have_the_bits_of_each(packing: str, rows: int) -> None:
    widths, inputs = {"q": 64, "k": 16, "v": 48}, torch.randn(1, rows, 512)
    weights = {name: StoredWeight(raw_weight(packing, width, 512), packing) for name, width in widths.items()}
    x, other = Ref("x"), Ref("other")
    ops = [Op(name, "aten.linear.default", (x, Ref(f"{name}.weight"), None), {}) for name in widths]
    (whole,) = products_of_one_input(ops, weights).items()
    alone = products_of_one_input([replace(ops[0], arguments=(other, *ops[0].arguments[1:])), *ops[1:]], weights)
    assert [whole[0], *alone] == [("q", "k", "v"), ("q",), ("k", "v")]
    together = products_of(dict([whole]), inputs, widths)
    for name, weight in weights.items():
        (found,) = products_of({(name,): weight}, inputs, {name: widths[name]})
        assert np.array_equal(found, together.pop(0)), name


def products_of(
    packed: Mapping[tuple[str, ...], Blocks | StoredWeight], inputs: Tensor, widths: Mapping[str, int]
) -> list[Any]:
    """Multiply an input with several weights in ONNX Runtime."""
    nodes = Nodes(packed={names: weight.blocks() for names, weight in packed.items()})
    given, made = Made(nodes, torch.float32, tuple(inputs.shape), known_as="inputs"), []
    for nodes.operation, width in widths.items():
        product = nodes.packed_product(given)
        made.append(Made(nodes, torch.float32, (*inputs.shape[:-1], width), known_as=product))
    return list(compile_model(nodes.model([given], made))({"inputs": inputs.numpy()}))


@pytest.mark.parametrize("weight", [torch.zeros(3, 4), torch.full((2, 40), 1e-30), torch.tensor([[3e38, -3e38]])])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_hold_weights_at_the_ends_of_their_range(weight: Tensor, bits: int) -> None:
    found = in_blocks(weight, bits).weight()
    assert bool(found.isfinite().all())
    assert float((found - weight).abs().amax()) <= float(weight.abs().amax()) / 7


@pytest.mark.parametrize("packing", first(2, ["Q4_K", "F16", "Q6_K", "Q8_0", "BF16"]))
def test_engine_holds_the_bytes_that_are_counted(packing: str) -> None:
    program = [sys.executable, "-m", "tests.programs.engine_memory", packing]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    counted, held = map(float, done.stdout.split())
    mapped = packing in {"F16", "BF16"}  # from a file
    assert held < counted / 8 if mapped else held == pytest.approx(counted, rel=0.15)
