"""The caller's memory is the caller's: inputs may be used again, and outputs changed, once a call has returned."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.deploy.bundle import write_bundle
from penstock.deploy.state import load_state
from penstock.graph.capture import capture
from penstock.graph.cuts import graph_fingerprint
from penstock.graph.graph import Graph
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.pipeline import Pipeline
from penstock.spec.plan import CutSet, DeviceLoad, Plan, PlannedStage, Prediction
from penstock.spec.plan import PlannedPipeline as PlannedPipeline
from penstock.zoo.weights.weights import ModuleWeights
from tests.fewer import long
from tests.processes import PROGRAMS, run_groups

NUM, WIDTH = 12, 64


class Passing(nn.Module):
    """Gives its input back beside what it computes, and a buffer of its own."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mean", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x
        for layer in self.layers:
            y = y + torch.relu(layer(y))
        return y, x, self.mean * 1


def passing() -> Passing:
    torch.manual_seed(0)
    return Passing().eval()


def different(num: int = NUM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(num)]


def check(pipe: Pipeline, model: nn.Module) -> None:
    """Stream from one buffer that is filled again and again, and write into every output."""
    inputs = different()
    with torch.no_grad():
        expected = [[part.clone() for part in model(x)] for x in inputs]
    buffer = torch.empty(2, WIDTH)

    def feed() -> Iterator[Tensor]:
        for x in inputs:
            buffer.copy_(x)
            yield buffer
            buffer.fill_(float("nan"))  # as soon as the next one is asked for

    for _ in range(2):
        count = 0
        for given, right in zip(pipe.stream(feed()), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(given, right, strict=True)), f"microbatch {count}"
            for part in given:
                part.fill_(float("inf"))
            buffer.fill_(float("-inf"))
            count += 1
        assert count == NUM


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = start_local(3)
    yield made
    made.close(0.0)


@pytest.mark.parametrize("stages", [3, *map(long, (1, 2, 4))])
def test_inputs_can_be_reused_with_workers(world: World, stages: int) -> None:
    model = passing()
    with Pipeline(model, (different(1)[0],), stages=stages, world=world, threads=1) as pipe:
        check(pipe, model)


class Two(Passing):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x)[:2]


@pytest.mark.parametrize("stages", [1, 2])
def test_inputs_can_be_reused_after_microbatches(world: World, stages: int) -> None:
    torch.manual_seed(0)
    model, batch = Two().eval(), torch.cat(different())
    with torch.no_grad():
        expected = [part.clone() for part in model(batch)]
    with Pipeline(model, (batch[:2],), stages=stages, world=world, threads=1) as pipe:
        for given in (pipe(batch, microbatch_size=2), pipe(batch, microbatch_size=2)):
            assert torch.allclose(given[0], expected[0], atol=1e-6)
            assert torch.equal(given[1], expected[1])
            given[1].fill_(float("nan"))


@pytest.mark.parametrize("num_modules", [1, 2, 3])
def test_inputs_can_be_reused_with_a_list_of_modules(num_modules: int) -> None:
    class First(Passing):
        """All of it in one module; what follows passes on what comes."""

    class Pass(nn.Module):
        def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
            return parts

    torch.manual_seed(0)
    first = First().eval()
    with Pipeline([first, *(Pass() for _ in range(num_modules - 1))], (different(1)[0],)) as pipe:
        check(pipe, first)


def planned(model: nn.Module, devices: int, pipelines: int, *, rotating: bool = True) -> tuple[Graph, Plan]:
    """A plan of several pipelines side by side whose cut sets take turns."""
    graph = capture(model, (different(1)[0],))
    names = [f"layers.{index}:after" for index in range(3)]
    places = [tuple(f"d{index}" for index in range(p * devices, (p + 1) * devices)) for p in range(pipelines)]
    sets = [names[shift : shift + devices - 1] for shift in ((0, 1) if rotating else (0,))] if devices > 1 else [[]]
    plan = Plan(
        model="Passing", graph=graph_fingerprint(graph), profile="0" * 16, cluster="0" * 16, microbatch_rows=2,
        pipelines=tuple(
            PlannedPipeline(
                stages=tuple(PlannedStage(device=name) for name in each),
                cut_sets=tuple(CutSet(cuts=tuple(cuts), weight=1 / len(sets)) for cuts in sets),
                share=1 / pipelines,
            )
            for each in places
        ),
        loader="d0", writer="d0",
        prediction=Prediction(
            rows_per_s=1.0, bound_rows_per_s=1.0, latency_s=1.0, num_rows=1, total_s=1.0, limit="d0",
            devices=tuple(DeviceLoad(device=name, load_s=1.0, memory_bytes=1.0) for each in places for name in each),
        ),
    )  # fmt: skip
    return graph, plan


@pytest.mark.parametrize(("devices", "pipelines"), [(1, 3), (2, 1), (3, 1)])
def test_inputs_can_be_reused_with_a_plan(world: World, devices: int, pipelines: int) -> None:
    model = passing()
    _, plan = planned(model, devices, pipelines)
    with Pipeline(model, (different(1)[0],), plan=plan, world=world, threads=1) as pipe:
        check(pipe, model)


def test_inputs_can_be_reused_with_a_bundle(tmp_path: Path) -> None:
    model = passing()
    graph, plan = planned(model, 2, 1)
    write_bundle(tmp_path, graph, plan, partial(load_state, graph, weights=ModuleWeights(model)))
    with Pipeline.from_bundle(tmp_path, threads=1) as pipe:
        check(pipe, model)


def test_inputs_can_be_reused_under_torchrun() -> None:
    groups = [(processes, [str(stages)]) for processes in (1, 2, 3) for stages in (1, 2, 3) if stages >= processes]
    ended = run_groups(PROGRAMS / "callers_memory.py", groups, 120.0)
    assert all(end.status == 0 for group in ended for end in group)


@pytest.mark.parametrize("stages", [1, 3])
def test_inputs_can_be_reused_in_one_process(stages: int) -> None:
    model = passing()
    parts = penstock.split(model, (different(1)[0],), stages=stages)
    expected = torch.arange(float(WIDTH))
    for _ in range(2):
        given = parts(different(1)[0])
        assert torch.equal(given[2], expected)
        given[2].fill_(0.0)


def test_outputs_of_a_training_pipeline_can_be_changed() -> None:
    model = passing().train()
    with Pipeline(model, (different(1)[0],), threads=1) as pipe:
        for _ in range(2):
            given = pipe(different(1)[0])
            assert torch.equal(given[2], torch.arange(float(WIDTH)))
            given[2].fill_(0.0)
