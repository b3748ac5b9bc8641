"""Operators of other libraries: allowed and imported by each process's own environment."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import CaptureError, ProgramError, UsageError
from penstock.graph.capture import capture
from penstock.graph.operators import ALLOW, FROM, check_operator
from penstock.pipeline import Pipeline

NAME = "penstock_test_operators"
SCALE = f"{NAME}.scale.default"
ANOTHER = "penstock_test_another"  # imported by no other test
MODULE = f'''
import torch
@torch.library.custom_op("{NAME}::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by
scale.register_fake(lambda x, by: torch.empty_like(x))
def keep(ctx, inputs, output):
    ctx.by = inputs[1]
scale.register_autograd(lambda ctx, g: (g * ctx.by, None), setup_context=keep)
'''


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(getattr(torch.ops, NAME).scale(self.first(x), 2.0))
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("operators")
    for name in (NAME, ANOTHER):
        (made / f"{name}.py").write_text(MODULE.replace(NAME, name))
    sys.path.insert(0, str(made))
    yield made
    sys.path.remove(str(made))


@pytest.mark.usefixtures("folder")
def test_an_operator_is_imported_by_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = f"{ANOTHER}.scale.default"
    with pytest.raises(ProgramError, match=rf"{ALLOW}={scale} and {FROM}="):
        check_operator(scale)
    monkeypatch.setenv(FROM, ANOTHER)
    with pytest.raises(ProgramError, match=ALLOW):
        check_operator(scale)
    assert ANOTHER not in sys.modules
    monkeypatch.setenv(ALLOW, scale)
    check_operator(scale)
    assert ANOTHER in sys.modules
    monkeypatch.setenv(FROM, "no_such_module")
    with pytest.raises(UsageError, match="no_such_module"):
        check_operator(scale)


def test_a_model_with_an_operator_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    __import__(NAME)
    model, x, y = Scaled().train(), torch.randn(8, 4), torch.randint(3, (8,))
    with pytest.raises(CaptureError, match=rf"{SCALE}.*test_operators\.py.*{ALLOW}={SCALE}"):
        capture(model, (x,))
    monkeypatch.setenv(ALLOW, SCALE)
    monkeypatch.setenv(FROM, NAME)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    expected = F.cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(expected, model.first.weight)
    with Pipeline(model, x, stages=1, microbatches=1) as pipe:
        assert float(pipe.train_step(x, y, F.cross_entropy)) == pytest.approx(float(expected.detach()))
        torch.testing.assert_close(model.first.weight.grad, gradient)
    with Pipeline(model.eval(), x, stages=2) as pipe:  # in worker processes
        torch.testing.assert_close(pipe(x, microbatch_size=8), model(x).detach())
