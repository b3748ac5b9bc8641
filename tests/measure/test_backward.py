"""Units that go forward and backward one by one do what the model does, and keep what they are said to keep."""

import time
from functools import partial

import pytest
import torch
from torch import nn

from penstock.deploy.state import load_state
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts
from penstock.measure.backward import Trainable, loss_bytes, unit_bytes
from penstock.measure.profiler import profile_graph
from penstock.zoo.weights.weights import ModuleWeights
from tests.fewer import long
from tests.models import deit, gpt2

ROW = 4 * 4


class Chain(nn.Module):
    """Two matrix products with a square between them: all three keep their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x) ** 2)
        return result


@pytest.mark.parametrize("build", ["deit", long("gpt2")])
def test_all_cuts_give_the_gradients_of_none(build: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = (deit() if build == "deit" else gpt2()).train()
    example = torch.randn(2, 3, 32, 32) if build == "deit" else torch.randint(0, 80, (2, 9))
    graph = capture(model, (example,))
    load = partial(load_state, graph, weights=ModuleWeights(model))
    found = []
    for cuts in (list(Cuts(graph)), []):
        parts = Trainable(graph, load, cuts)
        torch.manual_seed(1)
        forward_s, backward_s = parts.step(graph.sizes(2), time.perf_counter)
        assert len(forward_s) == len(backward_s) == len(cuts) + 1
        found.append({name: tensor.grad for name, tensor in parts._tensors.items() if tensor.requires_grad})
    assert len(found[0]) > 10
    for name, whole in found[1].items():
        assert whole is not None
        torch.testing.assert_close(found[0][name], whole, rtol=1e-4, atol=1e-5)


def test_kept_bytes_by_hand() -> None:
    model = Chain().train()
    graph = capture(model, (torch.randn(2, 4),))
    # the model's input, the square's input and its result; weights do not count
    assert [unit.kept_per_row for unit in unit_bytes(graph, list(Cuts(graph)))] == [ROW, ROW, ROW]
    assert [unit.kept_per_row for unit in unit_bytes(graph, [])] == [3 * ROW]


def test_loss_bytes_are_counted() -> None:
    model = Chain().train()
    graph = capture(model, (torch.randn(2, 4),))
    found = loss_bytes(graph, lambda outputs, _rows: (outputs[0] ** 2).sum())
    # two outputs for each of two rows, and their sum; the square's backward makes gradients of as many bytes or more
    assert found.kept_per_row == 8 + 4 / 2
    assert found.working_per_row >= 8


def test_a_backward_makes_gradients_beside_those_that_are_there() -> None:
    model = Chain().train()
    graph = capture(model, (torch.randn(2, 4),))
    first, _, second = unit_bytes(graph, list(Cuts(graph)))
    assert first.working == 4 * 4 * 4  # the weight's; nothing goes back to the input
    assert (second.working, second.working_per_row) == (4 * 2 * 4, ROW)


def test_a_profile_of_training_has_both_directions() -> None:
    model = Chain().train()
    graph = capture(model, (torch.randn(2, 4),))
    load = partial(load_state, graph, weights=ModuleWeights(model))
    profile = profile_graph(graph, load, rows=(2, 4), repeats=3, training=True)
    for unit in profile.units:
        assert unit.backward_s is not None
        assert len(unit.forward_s) == len(unit.backward_s) == len(unit.backward_spread_s) == 2
        assert unit.kept_bytes_per_row == ROW
    assert sum(second for unit in profile.units for second in unit.backward_s or ()) > 0
