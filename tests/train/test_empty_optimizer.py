"""Optimizers of a part of the model, on processes that hold none of it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import penstock
from penstock.errors import UsageError
from penstock.group.world import World
from tests.fewer import first
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


MODEL = Model().train()
ROWS, LABELS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def of(pipe: Any, part: str) -> list[nn.Parameter]:
    return [p for name, p in pipe.named_parameters() if name.startswith(part)]


WAYS: dict[str, Any] = {
    "named": lambda pipe, _, part: pipe.optimizer(lambda _: torch.optim.AdamW(of(pipe, part), lr=0.05)),
    "generator": lambda pipe, _, part: pipe.optimizer(lambda _: torch.optim.SGD(iter(of(pipe, part)), lr=0.05)),
    "of the module": lambda pipe, model, part: pipe.optimizer(
        lambda _: torch.optim.Adagrad(getattr(model, part).parameters(), lr=0.05)
    ),
    "of those given": lambda pipe, model, part: pipe.optimizer(
        lambda given: torch.optim.RMSprop(
            [p for p in given if any(p is each for each in getattr(model, part).parameters())], lr=0.05
        )
    ),
    "groups": lambda pipe, _, part: pipe.optimizer(
        lambda _: torch.optim.SGD(
            [{"params": [p for p in of(pipe, part) if p.dim() == dim], "lr": 0.1 / dim} for dim in (1, 2)], momentum=0.9
        )
    ),
    "matrices": lambda pipe, _, part: pipe.optimizer(
        lambda _: torch.optim.Muon([p for p in of(pipe, part) if p.dim() == 2], lr=0.05)
    ),
}


def script(world: World, way: str, folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Train the two parts by turns, as a GAN does, with a checkpoint between two steps."""
    model = copy.deepcopy(MODEL)
    with penstock.Pipeline(model, ROWS, world=world, microbatches=2, **settings) as pipe:
        pipe.train_step(ROWS, LABELS, F.cross_entropy)
        optimizers = [WAYS[way](pipe, model, part) for part in ("body", "head")]
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in optimizers]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            pipe.train_step(ROWS, LABELS, F.cross_entropy)
            optimizers[step % 2].step()
            schedulers[step % 2].step()
            if step == 1:
                pipe.save_checkpoint(folder, optimizers, schedulers)
                pipe.load_checkpoint(folder, optimizers, schedulers)
        return {name: p.detach().clone() for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("way", first(3, [*WAYS]))
def test_a_stage_without_such_parameters_has_an_empty_optimizer(way: str, tmp_path: Path) -> None:
    (whole,) = in_threads(1, lambda world: script(world, way, tmp_path / "whole"))
    for held in in_threads(3, lambda world: script(world, way, tmp_path / "stages", stages=3)):
        for name, tensor in held.items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_is_empty_everywhere_is_refused() -> None:
    def misspelt(world: World) -> None:
        with penstock.Pipeline(copy.deepcopy(MODEL), ROWS, world=world, microbatches=2) as pipe:
            pipe.optimizer(lambda _: torch.optim.SGD(of(pipe, "haed"), lr=0.1))
            with pytest.raises(UsageError, match="no parameters on any rank"):
                pipe.train_step(ROWS, LABELS, F.cross_entropy)

    in_threads(2, misspelt)
    with pytest.raises(ValueError, match="empty parameter list"):
        in_threads(1, misspelt)
