"""A model that is changed after its stages were made."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.group.entry import thread_worlds
from penstock.pipeline import Pipeline

ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.scale, self.calls = nn.Linear(3, 3), nn.BatchNorm1d(3), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.fc(x)) * self.scale
        return found


@pytest.fixture
def model() -> Net:
    return Net().eval()


@pytest.fixture
def pipe(model: Net) -> Iterator[Pipeline]:
    (world,) = thread_worlds(["here"])
    with Pipeline(model, ROWS, stages=1, world=world) as pipe:
        yield pipe
    world.close(0.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: setattr(model, "scale", 2.0), r"scale was 1\.0"),
        (lambda model: model.train(), "mode"),
        (lambda model: setattr(model, "fc", nn.Linear(3, 3)), "submodules"),
        (lambda model: model.fc.register_forward_hook(lambda *_: None), "fc has other hooks"),
        (lambda model: setattr(model.norm, "eps", 0.1), r"norm\.eps"),
    ],
)
def test_another_model_is_refused(model: Net, pipe: Pipeline, change: Callable[[Net], Any], said: str) -> None:
    list(pipe.stream([ROWS]))
    change(model)
    with pytest.raises(UsageError, match=said):
        list(pipe.stream([ROWS]))
    with pytest.raises(UsageError, match=said):
        pipe(ROWS)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.fc.bias, "data", torch.zeros(3)),
        lambda model: model.load_state_dict(
            {n: torch.ones_like(t) for n, t in model.state_dict().items()}, assign=True
        ),
        lambda model: setattr(model.fc, "weight", nn.Parameter(torch.ones(3, 3))),
        lambda model: setattr(model.norm, "running_mean", torch.ones(3)),
        lambda model: setattr(model.fc, "bias", None),
        lambda model: model.double(),
    ],
    ids=["data", "assign", "parameter", "buffer", "none", "dtype"],
)
def test_other_weights_are_noticed(
    model: Net, pipe: Pipeline, change: Callable[[Net], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = pipe(ROWS, microbatch_size=4)
    change(model)
    assert torch.equal(pipe(ROWS, microbatch_size=4), before)
    assert "weights of Net" in capsys.readouterr().err


def test_streams_keep_the_first_weights_with_a_note(
    model: Net, pipe: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    before = pipe(ROWS, microbatch_size=4)
    model.calls = 5
    assert torch.equal(pipe(ROWS, microbatch_size=4), before)
    assert "weights" not in capsys.readouterr().err
    model.fc.weight.data.mul_(2)
    model.fc.bias.data = torch.zeros(3)
    assert torch.equal(pipe(ROWS, microbatch_size=4), before)
    assert "weights of Net" in capsys.readouterr().err
    pipe(ROWS, microbatch_size=4)
    model.to("meta")
    pipe(ROWS, microbatch_size=4)
    assert "weights of Net" not in capsys.readouterr().err
