"""Runtimes by name: those that are there are made, others refused by name before anything runs."""

import pytest
import torch
from torch import nn

from penstock.deploy.deployment import place
from penstock.deploy.run_options import RunOptions
from penstock.deploy.state import load_state
from penstock.errors import PlanError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, divide, graph_fingerprint
from penstock.pipeline import Pipeline
from penstock.runtime.registry import RUNTIMES, RuntimeChoice
from penstock.spec.plan import CutSet, DeviceLoad, Plan, PlannedPipeline, PlannedStage, Prediction
from penstock.zoo.weights.weights import ModuleWeights
from tests.fewer import long
from tests.worlds import memory_world


@pytest.mark.parametrize("name", [long(name) if name == "compiled" else name for name in RUNTIMES if name != "cuda"])
def test_a_named_runtime_computes_what_the_model_does(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.randn(3, 4)
    graph = capture(model, (x,))
    tensors = {state.value.name: load_state(graph, state, ModuleWeights(model)) for state in graph.states}
    runtime = RuntimeChoice(name, RUNTIMES[name].precisions[0]).load(divide(graph, [])[0], tensors)
    torch.testing.assert_close(runtime({"batch": 3}, [x])[0], model(x))


def test_unknown_runtime_is_refused() -> None:
    with pytest.raises(PlanError, match=r"one of eager, .*; got 'abacus'"):
        RuntimeChoice("abacus")


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(PlanError, match=r"eager .* float32, bfloat16; got float16"):
        RuntimeChoice("eager", "float16")


def test_a_gpu_that_is_missing_is_named_before_anything_runs() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU on this machine")
    with pytest.raises(PlanError, match="'cuda' is a GPU"):
        RuntimeChoice("cuda").check_machine()
    with pytest.raises(PlanError, match="'cuda' is a GPU"):
        Pipeline(nn.Linear(4, 4).eval(), torch.randn(3, 4), stages=2, runtime="cuda")


@pytest.mark.parametrize(
    ("change", "message"), [({"runtime": "abacus"}, "got 'abacus'"), ({"precision": "float16"}, "got float16")]
)
def test_a_plan_s_runtime_is_read(change: dict[str, str], message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    graph = capture(model, (torch.randn(1, 4),))
    cut = next(iter(Cuts(graph))).name
    stages = (PlannedStage(device="a"), PlannedStage(device="b", **change))  # type: ignore[arg-type]
    plan = Plan(
        model="two", graph=graph_fingerprint(graph), profile="", cluster="", microbatch_rows=1,
        pipelines=(PlannedPipeline(stages=stages, cut_sets=(CutSet(cuts=(cut,)),)),), loader="a", writer="a",
        prediction=Prediction(
            rows_per_s=1.0, bound_rows_per_s=1.0, latency_s=1.0, total_s=1.0, num_rows=1, limit="a",
            devices=tuple(DeviceLoad(device=name, load_s=1.0, memory_bytes=1.0) for name in "ab"),
        ),
    )  # fmt: skip
    weights = ModuleWeights(model)
    with memory_world(2) as world, pytest.raises(PlanError, match=message):
        place(world.feeder, graph, plan, lambda state: load_state(graph, state, weights), RunOptions(threads=1))
