"""Sums that are divided by a number from outside, with and without replicas."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import penstock
from penstock.errors import UsageError
from penstock.group.world import World
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

Loss = Callable[[Tensor, Tensor], Any]
Make = Callable[[Tensor, Tensor], Loss]  # of a replica's labels and all labels

MODEL = nn.Linear(4, 3).train()
ROWS = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(1))
EVEN = torch.arange(40).reshape(8, 5) % 3
UNEVEN = EVEN.clone()
UNEVEN[1, 2:] = UNEVEN[6, 1:] = -100


def total(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


def counted(labels: Tensor) -> int:
    return int((labels != -100).sum())


def divided(number: Callable[[Tensor], Any], *, as_factor: bool = False) -> Make:
    """Divide by a number of a replica's labels, as they come from the loader."""

    def make(labels: Tensor, _: Tensor) -> Loss:
        found = number(labels)
        return lambda out, own: total(out, own) * (1 / found) if as_factor else total(out, own) / found

    return make


def each_divided(labels: Tensor, _: Tensor) -> Loss:
    found = counted(labels)
    return lambda out, own: (F.cross_entropy(out.flatten(0, 1), own.flatten(), reduction="none") / found).sum()


LOCAL: dict[str, Make] = {
    "tokens": divided(counted),
    "rows": divided(len),
    "elements": divided(Tensor.numel),
    "tensor": divided(lambda labels: (labels >= 0).sum()),
    "factor": divided(counted, as_factor=True),
    "in the function": lambda labels, _: lambda out, own: total(out, own) / (labels != -100).sum(),
    "each": each_divided,
}
RIGHT: dict[str, Make] = {
    "the batch's": lambda _, whole: lambda out, own: total(out, own) / counted(whole),
    "corrected": lambda part, whole: (
        lambda out, own: total(out, own) / counted(part) * (counted(part) / counted(whole))
    ),
    "a constant": lambda *_: lambda out, own: total(out, own) / 1000.0,
    "a pair": lambda *_: lambda out, own: (total(out, own), counted(own)),
    "a mean": lambda *_: lambda out, own: F.cross_entropy(out.flatten(0, 1), own.flatten()),
    "in the function": lambda *_: lambda out, own: total(out, own) / (own != -100).sum(),
}


def losses(make: Make, labels: Tensor, replicas: int, *, stages: int = 1) -> list[float]:
    def script(world: World) -> float:
        each = len(labels) // replicas
        part = slice(world.rank // stages * each, (world.rank // stages + 1) * each)
        with penstock.Pipeline(
            copy.deepcopy(MODEL), ROWS[:1], world=world, replicas=replicas, stages=stages, microbatches=2
        ) as pipe:
            return float(pipe.train_step(ROWS[part], labels[part], make(labels[part], labels)))

    found: list[float] = in_threads(replicas * stages, script)
    return found


@pytest.mark.parametrize("labels", [EVEN, UNEVEN])
@pytest.mark.parametrize("name", LOCAL)
def test_a_number_of_one_replica_is_refused(name: str, labels: Tensor) -> None:
    wanted = float(LOCAL[name](labels, labels)(MODEL(ROWS), labels))
    assert losses(LOCAL[name], labels, 1)[0] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(UsageError, match=r"divides a sum by .*\(sum, count\)"):
        losses(LOCAL[name], labels, 2)


@pytest.mark.parametrize("labels", [EVEN, UNEVEN])
@pytest.mark.parametrize("name", RIGHT)
def test_a_number_of_the_batch_is_right(name: str, labels: Tensor) -> None:
    loss = RIGHT[name](labels, labels)(MODEL(ROWS), labels)
    wanted = float(loss[0] / loss[1] if isinstance(loss, tuple) else loss)
    for replicas in (1, 2):
        assert losses(RIGHT[name], labels, replicas) == pytest.approx([wanted] * replicas, rel=1e-5)
