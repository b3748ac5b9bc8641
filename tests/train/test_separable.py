from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import Optimizer

from penstock.errors import UsageError
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.separable import check_separable
from tests.trainers import in_threads, make_trainer

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[list[nn.Parameter]], Optimizer]


class Global(torch.optim.SGD):
    """Divides all gradients by the norm over all parameters, as some optimizers estimate one step size for all."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


class Closure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Refuses(torch.optim.SGD):
    """Takes no parameters but its own."""

    def step(self, closure: Any = None) -> Any:
        if len(self.param_groups[0]["params"]) != 7:
            raise KeyError("strange")
        return super().step(closure)


SEPARABLE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Muon": lambda p: torch.optim.Muon(p),
    "unknown": lambda p: Refuses(p, lr=0.1),
}
ACROSS: dict[str, Make] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "Global": lambda p: Global(p, lr=0.1),
    "Closure": lambda p: Closure(p, lr=0.1),
}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3, 4))]


@pytest.mark.parametrize("name", SEPARABLE)
def test_optimizers_that_work_parameter_by_parameter(name: str) -> None:
    given = parameters()
    optimizer = SEPARABLE[name](given)
    check_separable(optimizer)
    assert not optimizer.state or name == "Adagrad"
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in given)


@pytest.mark.parametrize("name", ACROSS)
def test_optimizers_that_look_across_parameters_are_refused_for_stages_alone(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        check_separable(ACROSS[name](parameters()))
    rows, labels = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    captured = Captured(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).train(), (rows,))

    def script(world: World, **settings: Any) -> None:
        trainer = make_trainer(captured, world, microbatches=2, **settings)
        trainer.optimizer(ACROSS[name])
        trainer.train_step(rows[:4], labels[:4], F.cross_entropy)
        trainer.close()

    in_threads(1, script)
    in_threads(2, lambda world: script(world, stages=1, replicas=2))
    with pytest.raises(UsageError, match=name):
        in_threads(2, lambda world: script(world, stages=2))
