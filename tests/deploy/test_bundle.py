"""Bundles: a stage runs from its own folder, and nothing but what was written is taken."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.deploy.bundle import read_bundle, read_part, write_bundle
from penstock.deploy.state import load_state
from penstock.errors import PenstockError, PlanError, ProgramError, UsageError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, graph_fingerprint
from penstock.graph.graph import Graph
from penstock.spec.fields import fingerprint
from penstock.spec.plan import CutSet, DeviceLoad, Plan, PlannedPipeline, PlannedStage, Prediction
from penstock.zoo.weights.weights import ModuleWeights
from tests.models import deit

ROWS = 2

# the reference computes with as many threads as the stages do
pytestmark = pytest.mark.usefixtures("one_thread")


def captured() -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = deit()
    return model, capture(model, (torch.randn(ROWS, 3, 32, 32),))


def plan_for(graph: Graph, devices: tuple[str, ...] = ("a", "b")) -> Plan:
    """Two devices whose cut takes turns."""
    names = [cut.name for cut in Cuts(graph)]
    middle = len(names) // 2
    sets = tuple(CutSet(cuts=(names[middle + shift],), weight=weight) for shift, weight in ((-4, 0.25), (4, 0.75)))
    loads = tuple(DeviceLoad(device=name, load_s=0.1, memory_bytes=1e6) for name in devices)
    prediction = Prediction(
        rows_per_s=10.0, bound_rows_per_s=10.0, latency_s=0.2, num_rows=10, total_s=1.0, limit="a", devices=loads
    )
    stages = tuple(PlannedStage(device=name) for name in devices)
    return Plan(
        model="deit", graph=graph_fingerprint(graph), profile="p", cluster="c", microbatch_rows=ROWS,
        pipelines=(PlannedPipeline(stages=stages, cut_sets=sets),), loader="a", writer="a", prediction=prediction,
    )  # fmt: skip


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[nn.Module, Plan, Path]:
    model, graph = captured()
    plan = plan_for(graph)
    folders = write_bundle(tmp_path / "bundle", graph, plan, partial(load_state, graph, weights=ModuleWeights(model)))
    assert [folder.name for folder in folders] == ["a", "b"]
    return model, plan, tmp_path / "bundle"


def test_a_part_has_its_own_weights_and_no_others(bundle: tuple[nn.Module, Plan, Path]) -> None:
    model, plan, folder = bundle
    sizes = []
    for device in ("a", "b"):
        programs, tensors = read_part(folder / device, fingerprint(plan))
        assert len(programs) == 2
        assert set(tensors) == {state.value.name for program in programs for state in program.states}
        sizes.append((folder / device / "weights.safetensors").stat().st_size)
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert max(sizes) < 0.8 * whole
    assert read_bundle(folder)[0] == plan


def test_bundle_computes_the_same_bits(bundle: tuple[nn.Module, Plan, Path]) -> None:
    model, _, folder = bundle
    inputs = [torch.randn(1 + index % ROWS, 3, 32, 32) for index in range(9)]
    with penstock.Pipeline.from_bundle(folder, threads=1) as pipe, torch.no_grad():
        for x, (result,) in zip(inputs, pipe.stream(inputs), strict=True):
            assert torch.equal(result, model(x))
        with pytest.raises(UsageError, match="1 positional inputs but called with 2"):
            list(pipe.stream([(inputs[0], inputs[0])]))
        with pytest.raises(UsageError, match="the plan's"):
            list(pipe.stream([torch.randn(ROWS + 1, 3, 32, 32)]))
        (result,) = pipe(inputs[1], microbatch_size=ROWS)
        assert torch.equal(result, model(inputs[1]))
        with pytest.raises(UsageError, match="2 rows cannot be cut"):
            pipe(inputs[1], microbatch_size=1)


def test_a_part_of_another_plan_is_refused(bundle: tuple[nn.Module, Plan, Path]) -> None:
    _, _, folder = bundle
    with pytest.raises(ProgramError, match=r"[0-9a-f]{16}\b.* other\b"):
        read_part(folder / "a", "other")


@pytest.mark.parametrize("name", ["program-0.json", "weights.safetensors"])
def test_a_changed_file_is_refused(bundle: tuple[nn.Module, Plan, Path], name: str) -> None:
    _, plan, folder = bundle
    data = bytearray((folder / "b" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "b" / name).write_bytes(data)
    with pytest.raises(ProgramError, match=name):
        read_part(folder / "b", fingerprint(plan))
    # and a run says so, from the worker that found it
    with pytest.raises(PenstockError, match=name), penstock.Pipeline.from_bundle(folder, threads=1) as pipe:
        list(pipe.stream([torch.randn(1, 3, 32, 32)]))


def test_files_outside_and_missing_files_are_refused(bundle: tuple[nn.Module, Plan, Path]) -> None:
    _, plan, folder = bundle
    part = json.loads((folder / "a" / "part.json").read_text())
    (folder / "a" / "part.json").write_text(json.dumps(part | {"files": {"../b/weights.safetensors": "0"}}))
    with pytest.raises(ProgramError, match=r"got '\.\./b/weights\.safetensors'"):
        read_part(folder / "a", fingerprint(plan))
    (folder / "a" / "part.json").write_text(json.dumps(part | {"programs": ["program-9.json"]}))
    with pytest.raises(ProgramError, match="does not list all"):
        read_part(folder / "a", fingerprint(plan))
    shutil.rmtree(folder / "a")
    with pytest.raises(ProgramError, match="a part cannot be read from"):
        read_part(folder / "a", fingerprint(plan))


@pytest.mark.parametrize("name", ["../../x", "/nowhere-of-this-test/x", "..", "", "a/b", "a\\b", "plan.json"])
def test_no_device_s_folder_lies_outside_of_the_bundle(tmp_path: Path, name: str) -> None:
    """A plan from elsewhere names the devices, and each of them gets a folder."""
    model, graph = captured()
    folder = tmp_path / "inside" / "bundle"
    with pytest.raises(PlanError, match=r"must be 1 to 128 letters|rename the device"):
        write_bundle(
            folder, graph, plan_for(graph, (name, "b")), partial(load_state, graph, weights=ModuleWeights(model))
        )
    assert not list(tmp_path.rglob("*.json"))


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    _, graph = captured()
    other = capture(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(PlanError, match="profile and plan this model"):
        write_bundle(tmp_path, other, plan_for(graph), lambda _state: torch.zeros(0))
