"""Tensors that a script gives the model during the training are those of the next call, as in one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from penstock.errors import UsageError
from penstock.group.world import World
from penstock.pipeline import Pipeline
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    shift: Tensor
    slope: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.never = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("slope", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        # exp(slope) depends on a buffer alone: a stage computes it once
        found: Tensor = self.last(torch.tanh(self.first(x) * self.slope.exp() + self.shift))
        return found


def net() -> Net:
    torch.manual_seed(2)
    return Net().train()


def assign(parameter: Tensor, tensor: Tensor) -> None:
    parameter.data = tensor


def clamp(model: Net) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def of_vector(model: Net) -> None:
    vector_to_parameters(0.5 * parameters_to_vector(model.parameters()), model.parameters())


def of_vector_changed_later(model: Net) -> None:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector, model.parameters())
    vector.mul_(0.5)


def halves(model: Net) -> dict[str, Tensor]:
    return {name: 0.5 * tensor for name, tensor in model.state_dict().items()}


def set_weight(model: Net) -> None:
    model.last.weight.set_(torch.full((3, 4), 0.2).untyped_storage(), 0, (3, 4), (4, 1))


CHANGES: dict[str, Callable[[Net], object]] = {
    "data clamped": clamp,
    "vector_to_parameters": of_vector,
    "a vector that changes later": of_vector_changed_later,
    "load_state_dict": lambda model: model.load_state_dict(halves(model)),
    "load_state_dict, assign": lambda model: model.load_state_dict(halves(model), assign=True),
    "set_": set_weight,
    "a parameter": lambda model: setattr(model.last, "weight", nn.Parameter(torch.full((3, 4), 0.2))),
    "a frozen parameter": lambda model: assign(model.first.bias, torch.ones(4)),
    "an unused parameter": lambda model: assign(model.never.bias, torch.ones(2)),
    "strides": lambda model: assign(model.first.weight, model.first.weight.data.t()),
    "a buffer": lambda model: setattr(model, "shift", torch.ones(4)),
    "a buffer's data": lambda model: assign(model.shift, torch.ones(4)),
    "a buffer in place": lambda model: model.shift.fill_(2),
    "a buffer that is read once": lambda model: setattr(model, "slope", torch.tensor(0.3)),
    "a buffer that is read once, in place": lambda model: model.slope.data.fill_(0.3),
}


def plain_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(ROWS), LABELS)


def value(model: nn.Module) -> float:
    return float(plain_loss(model).detach())


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_has_the_tensors_of_the_model(change: str, tmp_path: Path) -> None:
    model = net()
    twin = copy.deepcopy(model)
    with Pipeline(model, ROWS, stages=1, microbatches=2) as pipe:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
        for _ in range(2):
            pipe.evaluate(ROWS, LABELS, F.cross_entropy)
            loss, expected = pipe.train_step(ROWS, LABELS, F.cross_entropy), plain_loss(twin)
            expected.backward()
            assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
            for optimizer, each in zip(optimizers, (model, twin), strict=True):
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    CHANGES[change](each)
            assert pipe.evaluate(ROWS, LABELS, F.cross_entropy) == pytest.approx(value(twin), rel=1e-5)
            torch.testing.assert_close(pipe(ROWS), twin(ROWS).detach(), rtol=1e-5, atol=1e-6)
        pipe.save(tmp_path / "saved")
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(load_file(tmp_path / "saved")[name], tensor, rtol=1e-5, atol=1e-6)


def tie(model: Net) -> None:
    model.first.weight, model.last.weight = (nn.Parameter(torch.ones(4, 4)),) * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.double(), r"float32.*float64"),
        (lambda model: model.to("meta"), r"meta"),
        (lambda model: setattr(model.last, "weight", nn.Parameter(torch.ones(5, 4))), r"last\.weight.*5, 4"),
        (lambda model: prune.l1_unstructured(model.last, "weight", 0.5), r"last\.weight"),
        (lambda model: setattr(model.last, "bias", None), r"last\.bias"),
        (lambda model: setattr(model, "shift", torch.ones(8, 4)), r"shift.*8, 4"),
    ],
)
def test_another_format_is_refused(change: Callable[[Net], Any], said: str) -> None:
    model = net()
    with Pipeline(model, ROWS, stages=1, microbatches=2) as pipe:
        pipe.train_step(ROWS, LABELS, F.cross_entropy)
        change(model)
        with pytest.raises(UsageError, match=said):
            pipe.evaluate(ROWS, LABELS, F.cross_entropy)


def test_stages_follow_their_tensors() -> None:
    made = net()  # threads would disturb each other's generator
    halved = {name: tensor / 2 for name, tensor in made.state_dict().items()}

    def script(world: World) -> list[float]:
        model = copy.deepcopy(made)
        with Pipeline(model, ROWS, stages=2, microbatches=2, world=world) as pipe:
            pipe.train_step(ROWS, LABELS, F.cross_entropy)
            for parameter in model.parameters():
                parameter.data = parameter.data / 2
            model.load_state_dict({"shift": torch.ones(4)}, strict=False, assign=True)
            losses = [float(pipe.train_step(ROWS, LABELS, F.cross_entropy))]
            model.load_state_dict({name: tensor.clone() for name, tensor in halved.items()}, assign=True)
            return [*losses, pipe.evaluate(ROWS, LABELS, F.cross_entropy)]

    twin = net()
    twin.load_state_dict({name: tensor / 2 for name, tensor in twin.state_dict().items()})
    of_halves = value(twin)
    twin.slope.mul_(2)
    twin.shift.fill_(1)
    for found in in_threads(2, script):
        assert found == pytest.approx([value(twin), of_halves], rel=1e-5)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda model, _: AveragedModel(model), "copy"),
        (lambda model, _: parameters_to_vector(model.parameters()), "cat"),
        (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "another process"),
        (lambda model, _: [(0.9 * parameter).sum().item() for parameter in model.parameters()], "item"),
        (lambda model, _: [parameter.detach().numpy() for parameter in model.parameters()], "numpy"),
        (lambda model, _: model(ROWS), "linear"),
        (lambda _, loss: (2 * loss).backward(), "train_step"),
    ],
)
def test_values_of_other_processes_are_named(use: Callable[[Net, Tensor], object], said: str) -> None:
    made = net()

    def script(world: World) -> None:
        model = copy.deepcopy(made)
        with Pipeline(model, ROWS, stages=2, microbatches=2, world=world) as pipe:
            use(model, pipe.train_step(ROWS, LABELS, F.cross_entropy))

    with pytest.raises(UsageError, match=said):
        in_threads(2, script)


def test_loss_is_a_tensor_without_backward(tmp_path: Path) -> None:
    with Pipeline(net(), ROWS, stages=1, microbatches=2) as pipe:
        loss = pipe.train_step(ROWS, LABELS, F.cross_entropy)
        with pytest.raises(UsageError, match=r"loss\.backward\(\)"):
            loss.backward()
    torch.save({"losses": [loss]}, tmp_path / "log")
    assert torch.load(tmp_path / "log", weights_only=True) == {"losses": [loss]}
    assert float(torch.stack([loss, loss]).mean()) == float(loss)
