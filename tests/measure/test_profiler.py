"""What other runtimes take, measured beside eager."""

import pytest
import torch
from torch import nn

from penstock.deploy.state import load_state
from penstock.graph.capture import capture
from penstock.measure.costs import Timing
from penstock.measure.profiler import measure_runtimes
from penstock.plan.cost.problem import Placed, Problem
from penstock.plan.cost.stage_cost import Setting, factor_at
from penstock.runtime.registry import RuntimeChoice
from penstock.spec.profile import Boundary, RuntimeColumn, Unit
from penstock.zoo.weights.weights import ModuleWeights
from tests.spec.samples import make_cluster, make_profile

BOUNDARIES = (Boundary(name="input", bytes_per_row=0.0), Boundary(name="output", bytes_per_row=0.0))


def test_each_runtime_has_a_column_and_what_cannot_run_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    graph, weights = capture(model, (torch.randn(2, 16),)), ModuleWeights(model)
    choices = [RuntimeChoice("onnxruntime"), RuntimeChoice("onnxruntime", "int8")]
    found = measure_runtimes(graph, lambda state: load_state(graph, state, weights), choices, Timing((1, 4)))
    assert [(column.runtime, column.precision) for column in found] == [(c.name, c.precision) for c in choices]
    assert found[0].error < 1e-5 < found[1].error < 0.2
    assert all(len(column.forward_s) == 2 and min(column.forward_s + column.eager_s) > 0 for column in found)

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(1)

    other = capture(Sums().eval(), (torch.randn(2, 3),))
    assert measure_runtimes(other, lambda _state: torch.zeros(0), choices[:1], Timing((1,))) == ()
    assert "aten.cumsum.default" in capfd.readouterr().err


def test_units_are_faster_as_the_whole_model_is() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).eval()
    graph, weights = capture(model, (torch.randn(2, 4),)), ModuleWeights(model)
    (column,) = measure_runtimes(
        graph, lambda state: load_state(graph, state, weights), [RuntimeChoice("onnxruntime")], Timing((1,))
    )
    profile = make_profile([1.0, 3.0])
    factor = column.forward_s[0] / column.eager_s[0]
    problem = Problem(profile, make_cluster(2.0), Setting(), {"a": column})
    assert problem.own_s(0, Placed(0, 1, 2)) == pytest.approx(3.0 * factor / 2.0)
    assert factor_at(profile, column, 5) == factor


def test_sizes_between_measurements_are_interpolated() -> None:
    profile = make_profile([], rows=(1, 4), units=(Unit(forward_s=(1.0, 1.0)),), boundaries=BOUNDARIES)
    column = RuntimeColumn(
        runtime="openvino", precision="bfloat16", forward_s=(0.5, 0.2), eager_s=(1.0, 1.0), error=0.0
    )
    assert [factor_at(profile, column, rows) for rows in (1, 2, 4, 9)] == pytest.approx([0.5, 0.4, 0.2, 0.2])
    assert column.name == "openvino:bfloat16"
