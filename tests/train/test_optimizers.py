import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import Optimizer

import penstock
from penstock.errors import UsageError
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.optimizers import check_separable
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


class SharpnessAware(torch.optim.Optimizer):
    """As most implementations of SAM: wraps an optimizer, and climbs along all gradients before its step."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, dict(rho=0.05, **settings))
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=group["rho"] / norm)
        closure()
        self.base_optimizer.step()


class Climbing(torch.optim.SGD):
    def first_step(self) -> None: ...


class Raises(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("a closure is needed")
        return super().step(closure)


class Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer and steps it, as Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Never(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return closure


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
    "warm-up": lambda p: torch.optim.SGD(p, lr=0.0),
    "wrapping": lambda p: Wrapping(torch.optim.AdamW(p)),
}
ACROSS: dict[str, Make] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p), "Global": lambda p: Global(p, lr=0.1),
    "Closure": lambda p: Closure(p, lr=0.1), "SharpnessAware": lambda p: SharpnessAware(p, lr=0.1),
    "Climbing": lambda p: Climbing(p, lr=0.1), "Raises": lambda p: Raises(p, lr=0.1),
    "Refuses": lambda p: Refuses(p, lr=0.1), "Wrapping": lambda p: Wrapping(Global(p, lr=0.1)),
    "Never": lambda p: Never(p, lr=0.1),
}  # fmt: skip


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
def test_cross_parameter_optimizers_are_refused_for_stages(name: str) -> None:
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


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", ["LBFGS", "Global", "SharpnessAware", "SGD"])
def test_an_optimizer_of_the_model_is_checked_before_its_first_step(name: str, early: bool) -> None:
    rows, labels = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    whole = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).train()
    make = {**SEPARABLE, **ACROSS}[name]

    def script(world: World) -> None:
        model = copy.deepcopy(whole)
        optimizer = make(list(model.parameters())) if early else None
        with penstock.Pipeline(model, rows, stages=2, microbatches=2, world=world) as pipe:
            pipe.train_step(rows, labels, F.cross_entropy)
            optimizer = optimizer or make(list(model.parameters()))
            before = [p.detach().clone() for _, p in pipe.named_parameters()]
            if name == "SGD":
                torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps its step
                optimizer.step()
            else:
                with pytest.raises(UsageError, match=name):
                    optimizer.step(lambda: None)  # type: ignore[arg-type, return-value]
            now = [p for _, p in pipe.named_parameters()]
            assert all(torch.equal(*pair) for pair in zip(before, now, strict=True)) == (name != "SGD")

    in_threads(2, script)
