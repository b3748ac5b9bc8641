"""Parts of a model that only training has: automatic cuts exist in both modes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.group.world import World
from penstock.pipeline import Pipeline
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(4, (8,), generator=torch.Generator().manual_seed(1))


def perceptron(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


class Net(nn.Module):
    """A model whose largest part is an auxiliary head."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.first, self.body = nn.Linear(8, 8), perceptron(8, 2)
        self.aux, self.head = nn.Sequential(nn.Linear(8, 64), perceptron(64, 3), nn.Linear(64, 4)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        extra = self.aux(h) if self.training and self.place == "middle" else None
        out = self.head(self.body(h))
        if self.training and self.place == "end":
            extra = self.aux(h)
        return out if extra is None else (out, extra)


def loss_of(out: Any, labels: Tensor) -> Tensor:
    return sum((F.cross_entropy(o, labels) for o in (out if isinstance(out, tuple) else (out,))), torch.tensor(0.0))


@pytest.mark.parametrize("place", ["middle", "end"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("policy", ["balanced", "smallest-crossing"])
def test_an_evaluation_follows_an_epoch(place: str, stages: int, policy: str) -> None:
    torch.manual_seed(0)
    model = Net(place).train()

    def script(world: World) -> list[float]:
        with Pipeline(copy.deepcopy(model), ROWS, stages=stages, cuts=policy, microbatches=2, world=world) as pipe:
            return [float(pipe.train_step(ROWS, LABELS, loss_of)), pipe.evaluate(ROWS, LABELS, loss_of)]

    expected = []
    for mode in (True, False):
        with torch.no_grad():
            expected.append(float(loss_of(model.train(mode)(ROWS), LABELS)))
    model.train()
    for found in in_threads(stages, script):
        assert found == pytest.approx(expected, rel=1e-5)
