"""Attention over caches as an operation of ONNX Runtime: eager's numbers, any rows, the same bits at any cut."""

from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.errors import CutError, RunError
from penstock.graph.cuts import Cuts, divide
from penstock.graph.decoders import ATTENTION, ROTARY
from penstock.graph.ops import GETITEM, Op, Ref
from penstock.graph.program import StageProgram, read_program, write_program
from penstock.runtime.eager import Runtime
from penstock.runtime.onnx.cached_attention import with_cached_attention
from penstock.runtime.onnx.phases import pieces, some_sizes
from penstock.runtime.onnx.rotary import inputs_of_halves, with_rotary
from penstock.runtime.onnx.writer import Shapes
from penstock.runtime.registry import parse_runtime
from tests.fewer import long
from tests.generate.decoders import tensors_of
from tests.runtime.test_fused import CALLS, call, captured

pytestmark = pytest.mark.usefixtures("one_thread")
ONNX = parse_runtime("onnxruntime")


def joined(program: StageProgram) -> StageProgram:
    """The program with the operations that the engine has."""
    for fused in (with_rotary, with_cached_attention):
        program = fused(program, Shapes(program), some_sizes(program))
    return program


def count(program: StageProgram, target: str) -> int:
    return sum(op.target == target for op in joined(program).ops)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", long("qwen3")])
def test_numbers_are_those_of_eager(family: str) -> None:
    graph, model = captured(family)
    (program,) = divide(graph, [])
    assert (count(program, ATTENTION), count(program, ROTARY)) == (3, 6)
    tensors = tensors_of(graph, model)
    eager, engine = Runtime(program, tensors), ONNX.load(program, tensors)
    calls = [*CALLS, call(1, 26, 64)]
    calls[-1][1][2] = torch.tensor([1, 0])  # rows that are not neighbours are copied, and written back
    swapped = call(1, 27, 64)
    for sizes, inputs in (*calls, swapped):
        (wanted,), (found,) = eager(sizes, inputs), engine(sizes, inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", long("t5"), long("bloom")])
def test_other_attentions_stay_with_torch(family: str) -> None:
    if family == "llama":  # heads of 12 numbers, which the engine refuses
        graph, _ = captured(family)
    else:
        from penstock.generate.cached_decoder import CachedDecoder
        from penstock.graph.capture import capture
        from tests.generate.decoders import decoder

        model = CachedDecoder(decoder(family), slots=2, length=128).eval()
        graph = capture(model, (), model.example(2, 32), dynamic=model.dynamic, largest=model.largest)
    (program,) = divide(graph, [])
    assert count(program, ATTENTION) == 0
    assert [op.target for op in joined(program).ops].count("aten.index_put_.default") > 0


@torch.no_grad()
def test_a_mask_that_lets_a_token_see_a_later_one() -> None:
    graph, model = captured("qwen3")
    at = Cuts(graph).find("model.model.layers.0:after")
    _, program = divide(graph, [at])
    engine = ONNX.load(program, tensors_of(graph, model))
    sizes, inputs = second_stage(program, 0.5)
    engine(sizes, inputs)
    index = next(i for i, x in enumerate(inputs) if x.dtype == torch.bool)
    inputs[index] = torch.ones_like(inputs[index])
    with pytest.raises(RunError, match="mask"):
        engine(sizes, inputs)


@pytest.mark.long
@torch.no_grad()
def test_a_cosine_whose_halves_differ() -> None:
    graph, model = captured("qwen3")
    at = Cuts(graph).find("model.model.layers.0:after")
    _, program = divide(graph, [at])
    names = inputs_of_halves(joined(program))
    assert len(names) == 2
    engine = ONNX.load(program, tensors_of(graph, model))
    sizes, inputs = second_stage(program, 0.5)
    engine(sizes, inputs)
    index = [value.name for value in program.inputs].index(names[0])
    inputs[index] = torch.arange(inputs[index].numel(), dtype=torch.float32).view_as(inputs[index])
    with pytest.raises(RunError, match="halves"):
        engine(sizes, inputs)


def second_stage(program: StageProgram, value: float) -> tuple[dict[str, int], list[Tensor]]:
    """Inputs of a stage after the first: one token at position 3."""
    sizes = {"batch": 1, "step": 1, "wanted": 1, "room": 64}
    made: dict[str, Tensor] = {"positions": torch.tensor([[3]]), "rows": torch.tensor([0]), "last": torch.tensor([0])}
    mask = (torch.arange(64) <= 3).view(1, 1, 1, 64)
    return sizes, [
        made[x.name] if x.name in made else mask if x.dtype == torch.bool
        else torch.full(x.evaluate(sizes), value, dtype=x.dtype) for x in program.inputs
    ]  # fmt: skip


@torch.no_grad()
def test_the_same_bits_wherever_the_model_is_cut() -> None:
    graph, model = captured("qwen3")
    tensors = tensors_of(graph, model)

    def run(programs: list[StageProgram]) -> list[Tensor]:
        stages, found = [ONNX.load(program, tensors) for program in programs], []
        for step, start in ((8, 0), (1, 8), (1, 9)):
            sizes, tensors_in = call(step, start, 64)
            for stage in stages:
                tensors_in = stage({name: sizes[name] for name in stage.program.symbols}, tensors_in)
            found += tensors_in
        return found

    wanted = run(divide(graph, []))
    # a last stage without caches has an operation that engines lack
    every = [cut for cut in Cuts(graph) if all(program.caches for program in divide(graph, [cut]))]
    for cut in every[:: max(1, len(every) // 9)]:
        assert all(map(torch.equal, run(divide(graph, [cut])), wanted)), cut.name


def test_no_cut_inside_an_attention() -> None:
    graph, _ = captured("qwen3")
    attention = next(i for i, op in enumerate(graph.ops) if op.target.startswith("aten.scaled_dot"))
    assert attention in graph.forbidden
    assert attention + 1 not in graph.forbidden
    with pytest.raises(CutError, match="split an attention"):
        Cuts(graph).find("model.model.layers.0.self_attn/index_select:after")


def test_phase_is_divided_into_pieces() -> None:
    kinds = ["linear", "relu", "linear", "linear", "relu", "linear"]
    ops = [Op(f"x{index}", f"aten.{kind}.default", (Ref("y"),), {}) for index, kind in enumerate(kinds)]
    sizes = {"x0": 3, "x1": 9, "x2": 9, "x3": 0, "x4": 1, "x5": 1}
    divided = partial(pieces, num_bytes=lambda op: sizes[op.name], most=6)
    assert [[op.name for op in piece] for piece in divided(ops)] == [["x0", "x1"], ["x2"], ["x3", "x4", "x5"]]
    ops[4] = Op("x4", GETITEM, (Ref("x1"), 0), {})  # it must be in the piece of x1
    assert [[op.name for op in piece] for piece in divided(ops)] == [["x0", "x1", "x2", "x3", "x4"], ["x5"]]
    assert list(divided([])) == []


@pytest.mark.long
@torch.no_grad()
def test_positions_that_are_not_consecutive() -> None:
    graph, model = captured("qwen3")
    (program,) = divide(graph, [])
    engine = ONNX.load(program, tensors_of(graph, model))
    sizes, inputs = call(8, 0, 64, 8)
    inputs[1] = inputs[1].clamp(max=5)  # padding may repeat a position
    engine(sizes, inputs)
    inputs[1] = inputs[1].flip(1)
    with pytest.raises(RunError, match="consecutive"):
        engine(sizes, inputs)


@pytest.mark.long
def test_a_program_whose_rows_have_another_name() -> None:
    graph, _ = captured("qwen3")
    (program,) = divide(graph, [])
    text = write_program(program).replace('"rows"', '"lines"')
    assert count(read_program(text), ATTENTION) == 0
