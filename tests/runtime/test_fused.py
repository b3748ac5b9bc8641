"""A decoder's stage on an engine: eager's numbers, one model for all sizes, each row by itself."""

from collections.abc import Callable
from functools import partial

import onnx
import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.generate.cached_decoder import CachedDecoder
from penstock.generate.generator import Generator
from penstock.graph.capture import capture
from penstock.graph.cuts import divide
from penstock.graph.decoders import add_cache
from penstock.graph.graph import Graph
from penstock.runtime.eager import Runtime
from penstock.runtime.onnx.exported import Engine
from penstock.runtime.onnx.fused import JoinedRuntime
from penstock.runtime.onnx.onnx_nodes import Arrays
from penstock.runtime.onnx.onnx_runtime import compile_model
from penstock.runtime.onnx.openvino_runtime import compile_model as compile_openvino
from penstock.runtime.registry import parse_runtime
from tests.fewer import long
from tests.generate.decoders import decoder, expected, prompts, tensors_of

pytestmark = pytest.mark.usefixtures("one_thread")


def captured(name: str) -> tuple[Graph, nn.Module]:
    model = CachedDecoder(decoder(name), slots=2, length=128).eval()
    return capture(model, (), model.example(2, 32), dynamic=model.dynamic, largest=model.largest), model


def call(step: int, start: int, room: int, wanted: int = 1) -> tuple[dict[str, int], list[Tensor]]:
    """The sizes and inputs of tokens at some positions of two sequences."""
    ids = torch.arange(2 * step).view(2, step) % 100 + 3
    positions = torch.arange(start, start + step).expand(2, step).contiguous()
    sizes = {"batch": 2, "step": step, "wanted": wanted, "room": room}
    return sizes, [ids, positions, torch.arange(2), torch.arange(step - wanted, step), torch.arange(room)]


CALLS = (call(8, 0, 64, 8), call(16, 8, 64, 8), call(1, 24, 64), call(1, 25, 128))


class Compiled:
    """Compiles models and counts them."""

    def __init__(self, compile_one: Callable[[onnx.ModelProto, Arrays], Engine]) -> None:
        self.count, self._compile_one = 0, compile_one

    def __call__(self, model: onnx.ModelProto, apart: Arrays) -> Engine:
        self.count += 1
        return self._compile_one(model, apart)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "engine"), [("llama", compile_model), long("gpt2", compile_model), long("gemma3", compile_model),
                           ("llama", partial(compile_openvino, precision="float32"))],
)  # fmt: skip
def test_numbers_are_those_of_eager(family: str, engine: Callable[[onnx.ModelProto, Arrays], Engine]) -> None:
    graph, model = captured(family)
    (program,) = divide(graph, [])
    tensors = tensors_of(graph, model)
    compiled = Compiled(engine)
    eager, joined = Runtime(program, tensors), JoinedRuntime(program, tensors, compile_model=compiled)
    counts = []
    for sizes, inputs in CALLS:
        (wanted,), (found,) = eager(sizes, inputs), joined(sizes, inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        counts.append(compiled.count)
    assert counts[0] > 1
    assert counts[0] == counts[-1] < 10  # a model between two caches each, for all sizes


@torch.no_grad()
@pytest.mark.parametrize(("runtime", "near"), [("onnxruntime:int8", 0.05), ("onnxruntime:int4", 0.5)])
def test_weights_in_blocks(runtime: str, near: float) -> None:
    graph, model = captured("llama")
    (program,) = divide(graph, [])
    tensors = tensors_of(graph, model)
    eager, rounded = Runtime(program, tensors), parse_runtime(runtime).load(program, tensors)
    layers = "+".join(path for path, each in model.named_modules() if isinstance(each, nn.Linear))
    kept = parse_runtime(f"{runtime}+{layers}").load(program, tensors)
    assert rounded.weight_bytes < kept.weight_bytes
    for sizes, inputs in CALLS:
        (wanted,), (found,), (exact,) = (each(sizes, inputs) for each in (eager, rounded, kept))
        assert 0 < float((found - wanted).norm() / wanted.norm()) < near
        torch.testing.assert_close(exact, wanted, rtol=1e-4, atol=1e-4)


class Mean(nn.Module):
    """Keeps what it computes of each token, and expands a step's mean to as many tokens as the step has."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        add_cache(self, "kept", 2, 64, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])[:, None]
        self.kept.index_put_((rows, positions), self.first(x))
        mean = self.kept.mean()
        result: Tensor = self.second(x.mean(1, keepdim=True).expand_as(x) + mean + x)
        return result


@torch.no_grad()
def test_a_model_for_each_size_where_they_differ() -> None:
    torch.manual_seed(0)
    model, x = Mean().eval(), torch.randn(2, 8, 8)
    places = torch.arange(8).expand(2, 8).contiguous()
    graph = capture(model, (x, places), dynamic={"step": {"x": 1, "positions": 1}})
    (program,) = divide(graph, [])
    tensors = tensors_of(graph, model)
    compiled = Compiled(compile_model)
    eager, joined = Runtime(program, tensors), JoinedRuntime(program, tensors, compile_model=compiled)
    for step in (5, 8, 4, 5):
        given = {"batch": 2, "step": step}, [torch.randn(2, step, 8), places[:, :step].contiguous()]
        torch.testing.assert_close(joined(*given)[0], eager(*given)[0], rtol=1e-5, atol=1e-5)
    assert compiled.count == 1 + 3  # the first product's model serves all


@pytest.mark.parametrize("runtime", ["onnxruntime", long("onnxruntime:int4")])
def test_a_decoder_has_the_same_bits_in_any_company(runtime: str) -> None:
    model, given = decoder("llama"), prompts(5, 33, 1)
    found = []
    for stages, slots in ((1, 2), (2, 3)):
        with Generator(model, stages=stages, slots=slots, max_length=64, runtime=runtime) as generator:
            requests = [generator.submit(prompt, max_new_tokens=12) for prompt in given]
            found.append([(request.result(), request.logprobs) for request in requests])
    assert found[0] == found[1]
    if ":" not in runtime:
        wanted = [expected(model, prompt, max_new_tokens=12, do_sample=False) for prompt in given]
        assert [tokens for tokens, _ in found[0]] == wanted


@pytest.mark.parametrize("family", ["t5"])
def test_other_states_on_an_engine(family: str) -> None:
    model, given = decoder(family), prompts(5, 19, 1)
    wanted = []
    for runtime in ("eager", "onnxruntime"):
        with Generator(model, stages=2, slots=2, max_length=64, runtime=runtime) as generator:
            requests = [generator.submit(prompt, max_new_tokens=12) for prompt in given]
            wanted.append([request.result() for request in requests])
    assert wanted[0] == wanted[1]


def test_missing_engine_of_a_device_is_refused() -> None:
    graph, model = captured("gpt2")
    (program,) = divide(graph, [])
    with pytest.raises(PlanError, match="meta"):
        parse_runtime("onnxruntime:int4").load(program, tensors_of(graph, model), torch.device("meta"))
