"""`torch.amp.GradScaler` in a loop over a pipeline: as in one process, whichever stage overflows."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import penstock
from penstock.errors import UsageError
from penstock.group.world import World
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, LABELS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
LARGE = "2.weight"  # of the last of three stages
OVERFLOWS = 2  # the step whose gradient of it is not finite


MODEL = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)).train()


def model() -> nn.Module:
    return copy.deepcopy(MODEL)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def loop(
    one_step: Any, optimizers: list[torch.optim.Optimizer], named: Any, *, unscales: bool, saved: Any = None
) -> list[float]:
    """A loop of a user; returns the scale after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    if saved:
        scaler.load_state_dict(saved)
    scales = []
    for step in range(6):
        one_step(scaler)
        for name, parameter in named():
            if name == LARGE and step == OVERFLOWS:
                parameter.grad[0, 0] = float("inf")
        for optimizer in optimizers:
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def plain(make: Any, *, unscales: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = model()

    def one_step(scaler: Any) -> None:
        scaler.scale(F.cross_entropy(module(ROWS), LABELS)).backward()

    scales = loop(
        one_step, make(module, lambda made: made(module.parameters())), module.named_parameters, unscales=unscales
    )
    return scales, {name: p.detach() for name, p in module.named_parameters()}


def in_stages(world: World, make: Any, *, unscales: bool, saved: Any = None, **settings: Any) -> Any:
    module = model()
    with penstock.Pipeline(module, ROWS, world=world, microbatches=2, **settings) as pipe:

        def one_step(scaler: Any) -> None:
            pipe.train_step(ROWS, LABELS, lambda out, labels: scaler.scale(F.cross_entropy(out, labels)))

        optimizers = make(module, pipe.optimizer)
        scales = loop(one_step, optimizers, pipe.named_parameters, unscales=unscales, saved=saved)
        return scales, {name: p.detach().clone() for name, p in pipe.named_parameters()}


OPTIMIZERS = {
    "one": lambda _, make: [make(make_sgd)],
    "of the module": lambda module, _: [make_sgd(module.parameters())],
    "fused": lambda _, make: [make(lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True))],
}


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 3])
def test_all_stages_skip_a_step_if_one_overflows(kind: str, size: int, unscales: bool) -> None:
    scales, weights = plain(OPTIMIZERS[kind], unscales=unscales)
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
    found = in_threads(size, lambda world: in_stages(world, OPTIMIZERS[kind], unscales=unscales, stages=size))
    for each, held in found:
        assert each == scales
        for name, tensor in held.items():
            torch.testing.assert_close(tensor, weights[name])


def test_replicas_skip_together() -> None:
    scales, weights = plain(OPTIMIZERS["one"], unscales=True)
    for each, held in in_threads(
        2, lambda world: in_stages(world, OPTIMIZERS["one"], unscales=True, stages=1, replicas=2)
    ):
        assert each == scales
        for name, tensor in held.items():
            torch.testing.assert_close(tensor, weights[name])


def test_scales_that_differ_are_refused() -> None:
    state = torch.amp.GradScaler("cpu", init_scale=4.0).state_dict()
    with pytest.raises(UsageError, match=r"1024 on rank 0 and 4 on rank 1"):
        in_threads(
            2, lambda world: in_stages(world, OPTIMIZERS["one"], unscales=True, stages=2, saved=world.rank and state)
        )
