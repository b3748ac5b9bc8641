"""A model that a script changes after its capture: the evaluation follows, a step refuses."""

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from penstock.errors import UsageError
from penstock.group.world import World
from penstock.pipeline import Pipeline
from tests.fewer import first
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))


@dataclass
class Config:
    scale: float = 1.0
    name: str = "net"
    inner: dict[str, list[float]] = field(default_factory=lambda: {"factors": [1.0, 1.0]})


class Net(nn.Module):
    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 3)
        self.temperature, self.factors, self.options = 1.0, [1.0, 1.0], {"shift": 0.0}
        self.config, self.constant, self.epoch, self.history = Config(), torch.ones(4), 0, [0.0]
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.mode_factors = {True: 1.0, False: 2.0}

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(self.first(x)) * self.config.scale * self.config.inner["factors"][1]

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.hidden(x)) * self.constant * self.factors[0] + self.options["shift"]
        h = h * torch.tensor(self.mode_factors[self.training])
        found: Tensor = self.last(h) / self.temperature**self.power
        return found


def net() -> Net:
    torch.manual_seed(2)
    return Net().train()


@pytest.fixture
def model() -> Net:
    return net()


@pytest.fixture
def pipe(model: Net) -> Iterator[Pipeline]:
    with Pipeline(model, ROWS, stages=1, microbatches=2) as pipe:
        yield pipe


def step(pipe: Pipeline) -> float:
    return float(pipe.train_step(ROWS, LABELS, F.cross_entropy))


def evaluate(pipe: Pipeline) -> float:
    return pipe.evaluate(ROWS, LABELS, F.cross_entropy)


def plain(model: nn.Module) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(copy.deepcopy(model).eval()(ROWS), LABELS))


def replace_class(model: Net) -> None:
    class Hot(Net):
        power = 2.0

    model.temperature, model.__class__ = 3.0, Hot


def heat(model: Net) -> None:
    model.power, model.temperature = 3.0, 2.0


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "number": (lambda model: setattr(model, "temperature", 2.0), r"temperature was 1\.0 .* 2\.0"),
    "dropout": (lambda model: setattr(model.drop, "p", 0.5), r"drop\.p was 0\.0 .* 0\.5"),
    "list": (lambda model: model.factors.__setitem__(0, 3.0), "factors"),
    "dict": (lambda model: model.options.update(shift=2.0), "options.*shift"),
    "object": (lambda model: setattr(model.config, "scale", 2.0), "config.*scale"),
    "list in a dict of an object": (lambda model: model.config.inner["factors"].__setitem__(1, 5.0), r"factors"),
    "function": (lambda model: setattr(model, "act", torch.relu), "act"),
    "method": (lambda model: setattr(model, "hidden", types.MethodType(lambda _, x: x, model)), "hidden"),
    "forward": (lambda model: setattr(model.first, "forward", lambda x: x + 1), "forward"),
    "class attribute": (heat, r"power|temperature"),
    "class": (replace_class, "Hot|temperature"),
    "tensor": (lambda model: setattr(model, "constant", torch.full((4,), 2.0)), "constant"),
    "tensor in place": (lambda model: model.constant.mul_(2), "constant"),
}


@pytest.mark.parametrize("change", first(5, [*CHANGES]))
def test_the_evaluation_follows_and_a_step_refuses(model: Net, pipe: Pipeline, change: str) -> None:
    apply, said = CHANGES[change]
    step(pipe)
    before = evaluate(pipe)
    assert before == pytest.approx(plain(model), rel=1e-5)
    apply(model)
    assert evaluate(pipe) == pytest.approx(plain(model), rel=1e-5)
    torch.testing.assert_close(pipe(ROWS), copy.deepcopy(model).eval()(ROWS).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match=said):
        step(pipe)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: setattr(model, "last", nn.Linear(4, 3)), "Net has other submodules"),
        (lambda model: delattr(model, "drop"), "Net has other submodules"),
        (lambda model: model.first.register_forward_hook(lambda *_: _[-1] * 2), "first has other hooks"),
        (lambda model: model.first.register_forward_pre_hook(lambda *_: None), "first has other hooks"),
    ],
)
def test_other_modules_and_hooks_are_refused(
    model: Net, pipe: Pipeline, change: Callable[[Net], Any], said: str
) -> None:
    step(pipe)
    change(model)
    for call in (evaluate, step):
        with pytest.raises(UsageError, match=said):
            call(pipe)


def test_hooks_of_all_modules_are_refused(pipe: Pipeline) -> None:
    step(pipe)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UsageError, match="global"):
            step(pipe)
    finally:
        handle.remove()
    step(pipe)


def test_unread_attributes_may_change(model: Net, pipe: Pipeline) -> None:
    losses = [step(pipe), evaluate(pipe)]
    model.epoch, model.new, model.config.name = 3, "x", "other"  # type: ignore[assignment]
    model.history.append(1.0)
    model.temperature, model.factors = 1.0, [1.0, 1.0]
    assert [step(pipe), evaluate(pipe)] == losses
    model.temperature = 2.0
    model.temperature = 1.0
    assert [step(pipe), evaluate(pipe)] == losses
    model.eval()
    assert evaluate(pipe) == losses[1]
    model.train()
    assert step(pipe) == losses[0]


def test_stages_use_changed_models() -> None:
    made = net()  # threads would disturb each other's generator

    def script(world: World) -> list[float]:
        model = copy.deepcopy(made)
        with Pipeline(model, ROWS, stages=2, microbatches=2, world=world) as pipe:
            step(pipe)
            found = [evaluate(pipe)]
            for temperature in (2.0, 3.0):
                model.temperature = temperature
                found.append(evaluate(pipe))
            model.temperature = 1.0
            step(pipe)
            return [*found, evaluate(pipe)]

    model = net()
    expected = []
    for temperature in (1.0, 2.0, 3.0, 1.0):
        model.temperature = temperature
        expected.append(plain(model))
    for found in in_threads(2, script):
        assert found == pytest.approx(expected, rel=1e-5)
