"""Streams on another runtime than eager: the same outputs through any number of stages."""

import msgspec
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PlanError, RunError, UsageError
from penstock.graph.capture import capture
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.measure.profiler import counted_profile
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import make_plan
from penstock.plan.cost.stage_cost import computed_like
from penstock.runtime.bfloat16 import has_bfloat16
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import PlannedStage
from penstock.spec.profile import RuntimeColumn
from tests.models import deit

# how far from eager float32, as a part of the outputs' length
LIMITS = {"eager:bfloat16": 0.03, "onnxruntime": 1e-5, "onnxruntime:int8": 0.1,
          "openvino": 1e-5, "openvino:bfloat16": 0.03}  # fmt: skip
RUNTIMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif("bfloat16" in name and not has_bfloat16(), reason="this processor has no bfloat16"),
    )
    for name in LIMITS
]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return deit(3)


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(batch, 3, 32, 32, generator=generator) for batch in (2, 2, 1, 2)]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_runtime_streams_in_any_number_of_stages(world: World, model: nn.Module, runtime: str) -> None:
    found = []
    for stages in (1, 2, 3):
        with penstock.Pipeline(model, (images()[0],), stages=stages, world=world, runtime=runtime) as pipe:
            found.append(list(pipe.stream(images())))
    for outputs in zip(*found, strict=True):
        for other in outputs[1:]:
            if runtime.startswith("eager"):
                assert torch.equal(other, outputs[0])
            # OpenVINO keeps what lies between operations in 16 bits too, and what crosses a cut in 32
            near = 0.02 if runtime == "openvino:bfloat16" else 1e-5
            torch.testing.assert_close(other, outputs[0], rtol=near, atol=near * float(outputs[0].abs().max()))
    wanted = [model(x) for x in images()]
    for x, y in zip(found[0], wanted, strict=True):
        assert x.dtype == y.dtype
        assert torch.linalg.vector_norm(x - y) < LIMITS[runtime] * torch.linalg.vector_norm(y)
        assert ":" not in runtime or not torch.equal(x, y)


def test_a_runtime_for_each_stage(world: World, model: nn.Module) -> None:
    profile = counted_profile(capture(model, (images()[0],)), rows=2)
    ones = (1.0,) * len(profile.rows)
    column = RuntimeColumn(
        runtime="onnxruntime", precision="int8", forward_s=tuple(0.5 * one for one in ones), eager_s=ones, error=0.05
    )
    devices = (("a", ("onnxruntime:int8",)), ("b", ()))
    cluster = Cluster(
        devices=tuple(Device(name=name, speed=1.0, memory_bytes=2**34, runtimes=runtimes) for name, runtimes in devices)
    )
    plan = make_plan(
        msgspec.structs.replace(profile, runtimes=(column,)),
        cluster,
        PlanRequest(rows=(2,), alternate=False, replicas=False, max_error=0.1),
    )
    (pipeline,) = plan.pipelines
    assert {stage.device: stage.runtime for stage in pipeline.stages} == {"a": "onnxruntime", "b": "eager"}
    found = []
    for chosen in (
        plan,
        msgspec.structs.replace(plan, pipelines=computed_like(plan.pipelines, PlannedStage(device=""))),
    ):
        with penstock.Pipeline(model, (images()[0],), plan=chosen, world=world, threads=1) as pipe:
            found.append(torch.cat(list(pipe.stream(images()))))
    mixed, eager = found
    assert 0 < torch.linalg.vector_norm(mixed - eager) < LIMITS["onnxruntime:int8"] * torch.linalg.vector_norm(eager)


@pytest.mark.parametrize(
    ("runtime", "message"),
    [("abacus", "got 'abacus'"),
     ("onnxruntime:int3", "int4, stored, stored32; got int3"), ("eager:", "got ;")],
)  # fmt: skip
def test_names_of_runtimes(model: nn.Module, runtime: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        penstock.Pipeline(model, (images()[0],), runtime=runtime)


def test_runtimes_are_refused_for_modules_and_training() -> None:
    with pytest.raises(UsageError, match=r"a list of modules .*leave runtime out"):
        penstock.Pipeline([nn.Linear(2, 2)], (torch.zeros(1, 2),), runtime="onnxruntime")
    pipe = penstock.Pipeline(nn.Linear(2, 2).train(), (torch.zeros(1, 2),), runtime="onnxruntime")
    with pytest.raises(UsageError, match="the runtime onnxruntime cannot train"):
        pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_operator_missing_in_a_runtime_is_named() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh().cumsum(1)

    with (
        start_local(1) as world,
        pytest.raises((PlanError, RunError), match=r"aten\.cumsum\.default"),
        penstock.Pipeline(Sums().eval(), (torch.randn(2, 3),), stages=1, world=world, runtime="onnxruntime") as pipe,
    ):
        list(pipe.stream([torch.randn(2, 3)]))
