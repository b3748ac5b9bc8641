"""What is counted per unit agrees with what the stages really hold and send."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from penstock.deploy.state import load_state
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, divide
from penstock.measure.costs import held_by_units, spread, working_bytes
from penstock.measure.profiler import profile_graph
from penstock.zoo.weights.weights import ModuleWeights
from tests.fewer import long
from tests.models import deit, gpt2
from tests.pretend import module


@pytest.mark.parametrize("build", ["deit", long("gpt2")])
def test_a_profile_adds_up(build: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = deit() if build == "deit" else gpt2()
    example = torch.randn(2, 3, 32, 32) if build == "deit" else torch.randint(0, 80, (2, 9))
    graph = capture(model, (example,))
    cuts = Cuts(graph)
    profile = profile_graph(graph, partial(load_state, graph, weights=ModuleWeights(model)), rows=(1, 3), repeats=3)
    assert profile.cuts == tuple(cut.name for cut in cuts)
    assert len(profile.units) == len(cuts) + 1
    for cut, boundary in zip(cuts, profile.boundaries[1:-1], strict=True):
        for rows in (1, 2, 5):
            assert boundary.num_bytes(rows) == cut.num_bytes(graph.sizes(rows))
    # what units between two cuts hold is what the stage between them is sent
    chosen = [cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3]]
    bounds = [0, *(list(cuts).index(cut) + 1 for cut in chosen), len(profile.units)]
    for program, start, stop in zip(divide(graph, chosen), bounds, bounds[1:], strict=False):
        held = {name: size for unit in profile.units[start:stop] for name, size in unit.parameters}
        assert held == {state.value.name: state.value.num_bytes({}) for state in program.states}
    assert all(second >= 0 for unit in profile.units for second in unit.forward_s)
    assert sum(unit.forward_s[1] for unit in profile.units) > 0


def test_working_memory_counts_what_lives_at_the_same_time() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.repeat(1, 8)  # 8 parts beside the input
            view = wide.view(-1, 8, 4)  # nothing more
            return view.sum(dim=1)  # one part, while the wide one still lives

    graph = capture(Chain(), (torch.randn(2, 4),))
    whole = [0, len(graph.ops)]
    row = 4 * 4
    assert working_bytes(graph, whole, 1) == [9 * row]
    assert working_bytes(graph, whole, 3) == [27 * row]
    assert held_by_units(graph, whole) == [()]


def test_spread_is_the_middle_half() -> None:
    assert spread([5.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == 2.0


def test_weights_in_blocks_are_numbers_for_a_runtime_that_unpacks_them() -> None:
    graph = capture(nn.Linear(64, 8, bias=False), (torch.randn(2, 64),))
    states = tuple(replace(state, packing="Q8_0") for state in graph.states)
    positions = [0, len(graph.ops)]
    (((_, unpacked),),) = held_by_units(replace(graph, states=states), positions)
    (((_, packed),),) = held_by_units(replace(graph, states=states), positions, packed=True)
    assert unpacked == 64 * 8 * 4
    assert 8 * 2 * 34 < packed < unpacked  # two blocks of 34 bytes a row, and the engine's copy


@pytest.mark.parametrize("training", [False, True])
def test_a_profile_of_another_device_waits_for_it(training: bool, pretended: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).train(training)
    graph = capture(model, (torch.randn(2, 4),))
    load = partial(load_state, graph, weights=ModuleWeights(model))
    before = module.num_settled
    loss = (lambda outputs, _rows: outputs[0].sum()) if training else None
    profile = profile_graph(graph, load, rows=(2,), repeats=3, device=pretended, training=training, loss=loss)
    assert profile.device == "Pretended GPU"
    assert module.num_settled - before > 3 * len(graph.ops)  # after each operation
    assert all(unit.forward_s[0] > 0 for unit in profile.units)
    assert [unit.backward_s is not None and unit.backward_s[0] > 0 for unit in profile.units] == [training] * 3


def test_convolution_reorders_its_weight() -> None:
    model, x = nn.Conv2d(2, 8, 3), torch.randn(2, 2, 5, 5)
    graph = capture(model, (x,))
    (found,) = working_bytes(graph, [0, len(graph.ops)], 1)
    assert found == 4 * (2 * 5 * 5 + 8 * 3 * 3 + 8 * 2 * 3 * 3)
