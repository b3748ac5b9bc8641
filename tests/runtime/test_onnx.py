"""ONNX Runtime and OpenVINO compute what eager does: operators, models, sizes; what they cannot run is named."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from penstock.deploy.state import load_state
from penstock.errors import PlanError, RunError, UsageError
from penstock.graph.capture import capture
from penstock.graph.cuts import divide
from penstock.graph.program import StageProgram
from penstock.runtime.bfloat16 import has_bfloat16
from penstock.runtime.eager import Runtime
from penstock.runtime.onnx.exported import ExportedRuntime
from penstock.runtime.onnx.onnx_runtime import OnnxRuntime
from penstock.runtime.onnx.openvino_runtime import OpenVinoRuntime
from penstock.runtime.onnx.writer import check_supported, unsupported
from penstock.runtime.registry import RuntimeChoice, parse_runtime
from penstock.zoo.weights.weights import ModuleWeights
from tests.fewer import long
from tests.models import bert, deit, gpt2, seeded

pytestmark = pytest.mark.usefixtures("one_thread")


class Does(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self._function(*given)


def parts(model: nn.Module, *args: Tensor) -> tuple[StageProgram, dict[str, Tensor]]:
    graph = capture(model.eval(), args)
    (program,) = divide(graph, [])
    weights = ModuleWeights(model)
    return program, {state.value.name: load_state(graph, state, weights) for state in program.states}


def both(
    model: nn.Module, *args: Tensor, precision: str = "float32", engine: type[ExportedRuntime] = OnnxRuntime
) -> tuple[list[Tensor], list[Tensor]]:
    program, tensors = parts(model, *args)
    sizes = dict.fromkeys(program.symbols, len(args[0]))
    runtime = engine(program, tensors, precision=precision)
    runtime(sizes, [x.clone() for x in args])
    return Runtime(program, tensors)(sizes, [x.clone() for x in args]), runtime(sizes, [x.clone() for x in args])


def assert_close(model: nn.Module, *args: Tensor) -> None:
    for engine in (OnnxRuntime, OpenVinoRuntime):
        for wanted, found in zip(*both(model, *args, engine=engine), strict=True):
            assert (wanted.dtype, wanted.shape) == (found.dtype, found.shape)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _in_place(x: Tensor) -> Tensor:
    hidden = x * 2
    hidden.relu_()
    hidden.add_(x)
    return hidden.tanh()


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "parts": lambda x: torch.cat([x.split([1, 3, 4], 1)[2], x.unbind(1)[3][:, None], x.chunk(2, 1)[1]], 1),
    "slices": lambda x: x[:, -3:-1, ::2] + x[:, 2:4, 1::2] * x[:, -1, :1, None],
    "views": lambda x: x.permute(-1, 0, 1).flatten(1).unflatten(1, (-1, 4)).unsqueeze(0).squeeze(0).mT,
    "stacks": lambda x: torch.stack([x, x.expand(3, -1, -1, -1)[1]], -2),
    "promotion": lambda x: (x.int() + 0.5) / 3 + (x > 0) - (2 * x.int()),
    "comparisons": lambda x: torch.where(x >= x.mean(-1, keepdim=True), x, -x).masked_fill(x == 0, 7.0),
    "reductions": lambda x: x.mean((-1, 1)) + x.sum(dtype=torch.float32) + x.abs().sqrt().pow(3).rsqrt().mean(),
    "activations": lambda x: (
        nn.functional.silu(x) + nn.functional.gelu(x, approximate="tanh") + x.sigmoid().exp().erf()
    ),
    "clipped": lambda x: nn.functional.relu6(3 * x) * nn.functional.hardswish(x),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "masked attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=(x @ x.mT) > -9),
    "attention to nothing": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT > 99),
    "products": lambda x: x.bmm(x.mT).matmul(x) - x,
    "in place": _in_place,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_exported_operators_are_close_to_eager(name: str) -> None:
    x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))
    assert_close(Does(OPERATIONS[name]), x)


class Convolutions(nn.Module):
    """What convolutional models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, (3, 1), padding=(1, 0), groups=4, dilation=(1, 1))
        self.pool, self.drop = nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.norm(self.first(x)).relu_())
        result: Tensor = nn.functional.adaptive_avg_pool2d(self.drop(self.pool(hidden)), 1).flatten(1)
        return result


def test_exported_convolutions_are_close_to_eager() -> None:
    model = seeded(Convolutions)
    model(torch.randn(4, 3, 9, 9))  # statistics that are not 0 and 1
    assert_close(model.eval(), torch.randn(2, 3, 9, 9))


@cache
def _models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (3, 9))
    resnet = timm.create_model("resnet18", num_classes=5)
    return {
        "deit": (deit(2), (torch.randn(3, 3, 32, 32),)),
        "resnet": (resnet, (torch.randn(2, 3, 40, 40),)),
        "bert": (bert(), (ids,)),
        "gpt2": (gpt2(), (ids,)),
    }


@pytest.mark.parametrize("name", ["deit", "gpt2", long("resnet"), long("bert")])
def test_exported_models_are_close_to_eager(name: str) -> None:
    model, args = _models()[name]
    assert_close(model, *args)


def test_other_sizes_have_sessions_of_their_own() -> None:
    model, (images,) = _models()["deit"]
    program, tensors = parts(model, images)
    runtime = OnnxRuntime(program, tensors)
    for count in (3, 1, 2, 3, 1):
        (found,) = runtime({"batch": count}, [images[:count]])
        torch.testing.assert_close(found, model(images[:count]), rtol=1e-4, atol=1e-5)
        found.zero_()  # its own: the next one is not


def test_inputs_of_any_strides() -> None:
    model, (images,) = _models()["deit"]
    program, tensors = parts(model, images)
    runtime = OnnxRuntime(program, tensors)
    last = images.contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.testing.assert_close(runtime({"batch": 3}, [last])[0], model(images), rtol=1e-4, atol=1e-5)


def test_eight_bits_are_near_and_smaller() -> None:
    model, (images,) = _models()["deit"]
    (wanted,), (found,) = both(model, images, precision="int8")
    assert not torch.equal(found, wanted)
    assert torch.linalg.vector_norm(found - wanted) < 0.1 * torch.linalg.vector_norm(wanted)


def test_unsupported_operators_are_refused_before_a_run() -> None:
    program, tensors = parts(Does(lambda x: x.cumsum(0).cummax(0)[0] + x.cumsum(1)), torch.randn(2, 3))
    assert unsupported(program) == ["aten.cumsum.default", "aten.cummax.default"]
    with pytest.raises(PlanError, match=r"aten\.cumsum\.default, aten\.cummax\.default"):
        OnnxRuntime(program, tensors)
    pool, none = parts(Does(lambda x: nn.functional.adaptive_avg_pool2d(x, 2)), torch.randn(2, 3, 4, 4))
    with pytest.raises(PlanError, match="adaptive_avg_pool2d"):
        OnnxRuntime(pool, none)


def test_a_write_that_others_see_is_refused() -> None:
    def seen_elsewhere(x: Tensor) -> Tensor:
        hidden = x * 2
        view = hidden[:, :1]
        hidden.add_(1)
        return view + hidden

    program, _ = parts(Does(seen_elsewhere), torch.randn(2, 3))
    with pytest.raises(PlanError, match=r"aten\.add_\.Tensor .*memory"):
        check_supported(program)


def test_outputs_unlike_eager_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.runtime.onnx import onnx_operators as operators

    monkeypatch.setitem(operators.OPERATORS, "aten.tanh.default", operators.OPERATORS["aten.sigmoid.default"])
    program, tensors = parts(Does(torch.tanh), torch.randn(2, 3))
    with pytest.raises(RunError, match=r"tanh .*onnxruntime"):
        OnnxRuntime(program, tensors)({"batch": 2}, [torch.randn(2, 3)])


def test_exported_runtime_refuses_other_devices() -> None:
    program, tensors = parts(Does(torch.tanh), torch.randn(2, 3))
    with pytest.raises(PlanError, match="only on the CPU, but the device is cuda"):
        OnnxRuntime(program, tensors, torch.device("cuda"))


@pytest.mark.parametrize(("runtime", "extra"), [("onnxruntime", "onnx"), ("openvino", "openvino")])
def test_missing_package_of_a_runtime_is_named(runtime: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("penstock.runtime.onnx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, runtime, None)
    program, tensors = parts(Does(torch.tanh), torch.randn(2, 3))
    message = rf"the runtime {runtime} is not installed on this machine; install penstock\[{extra}\]"
    with pytest.raises(PlanError, match=message):
        RuntimeChoice(runtime).load(program, tensors)


@pytest.mark.skipif(not has_bfloat16(), reason="this processor has no bfloat16")
def test_openvino_in_bfloat16() -> None:
    model, args = _models()["deit"]
    (wanted,), (found,) = both(model, *args, precision="bfloat16", engine=OpenVinoRuntime)
    assert found.dtype == wanted.dtype
    error = torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)
    assert 1e-5 < error < 0.03


def test_openvino_on_a_processor_without_bfloat16(set_bfloat16: Callable[[bool], None]) -> None:
    set_bfloat16(False)
    program, tensors = parts(Does(torch.tanh), torch.randn(2, 3))
    with pytest.raises(PlanError, match="needs a processor with such instructions"):
        OpenVinoRuntime(program, tensors, precision="bfloat16")


def test_layers_that_stay_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    x = torch.randn(4, 32)
    program, tensors = parts(model, x)

    def outputs(name: str) -> Tensor:
        return parse_runtime(name).load(program, tensors)({"batch": 4}, [x])[0]

    wanted = model(x).detach()
    errors = {
        name: float((outputs(name) - wanted).norm())
        for name in ("onnxruntime:int8", "onnxruntime:int8+0", "onnxruntime:int8+2", "onnxruntime:int8+0+2")
    }
    assert errors["onnxruntime:int8+0+2"] < 1e-5 < min(errors["onnxruntime:int8+0"], errors["onnxruntime:int8+2"])
    assert len(set(errors.values())) == 4
    assert str(parse_runtime("onnxruntime:int8+0+2")) == "onnxruntime:int8+0+2"
    assert str(parse_runtime("openvino")) == "openvino"
    with pytest.raises(UsageError, match="precision is float32; "):
        parse_runtime("onnxruntime+0")


IDS = torch.arange(6).view(2, 3)


def integers(function: Callable[[Tensor], Tensor], kind: type[ExportedRuntime], ids: Tensor = IDS) -> Tensor:
    """Run a model of integers in a runtime."""
    graph = capture(Does(function).eval(), (ids,))
    (program,) = divide(graph, [])
    runtime = kind(program, {state.value.name: graph.constants[state.source] for state in program.states})
    return runtime(graph.sizes(len(ids)), [ids])[0]


@pytest.mark.parametrize(
    "function",
    [lambda i: i + 2**40, lambda i: i * 2**20, lambda i: i * i, lambda i: (i + 2**30) + 2**30, lambda i: i.sum(1)],
)
def test_openvino_refuses_integers_that_need_64_bits(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PlanError):
        integers(function, OpenVinoRuntime)


@pytest.mark.parametrize("function", [lambda i: i + 5, lambda i: i.view(-1), lambda i: i - 1])
@pytest.mark.parametrize("kind", [OnnxRuntime, OpenVinoRuntime])
def test_integers_are_exact(function: Callable[[Tensor], Tensor], kind: type[ExportedRuntime]) -> None:
    assert torch.equal(integers(function, kind), function(IDS))


def test_onnx_runtime_has_64_bits() -> None:
    x = torch.randn(2, 3)
    model = Does(lambda x: (x.long() + 0.5) / 3 - (2 * x.int()).sum(1, keepdim=True))
    (found,), expected = both(model, x)[1], model(x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(integers(lambda i: i + 2**40, OnnxRuntime), IDS + 2**40)


def test_openvino_refuses_inputs_that_need_64_bits() -> None:
    with pytest.raises(RunError, match=str(2**40)):
        integers(lambda i: i.view(-1), OpenVinoRuntime, IDS + 2**40 - 5)


@pytest.mark.parametrize("kind", [OnnxRuntime, OpenVinoRuntime])
def test_integers_unlike_eager_are_an_error(kind: Any) -> None:
    class Wrong(kind):  # type: ignore[misc]
        def _compile(self, model: Any) -> Any:
            run = super()._compile(model)
            return lambda given: [1 - x for x in run(given)]

    with pytest.raises(RunError):
        integers(lambda i: i + 1, Wrong)
