"""Groups of an optimizer after a resume: each parameter has its own settings, on any number of processes."""

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
from tests.trainers import in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).train()
ROWS, LABELS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def rate_of(name: str) -> float:
    """A learning rate for each layer."""
    return 0.1 / (1 + int(name[0]))


def by_layer(pipe: Any) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": rate_of(name)} for name, p in pipe.named_parameters()]


def by_kind(pipe: Any) -> list[dict[str, Any]]:
    named = list(pipe.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.02},
    ]


def by_rank(pipe: Any) -> list[dict[str, Any]]:
    return [{"params": [p for _, p in pipe.named_parameters()], "lr": 0.1 / (1 + pipe.trainer.world.rank)}]


def changed(groups: Any) -> Any:
    """What a script builds after its learning rates were edited: the checkpoint's count."""

    def build(pipe: Any) -> Any:
        return [{**group, "lr": 5.0} for group in groups(pipe)]

    return build


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.StepLR(o, 1)], [2]
    ),
}


def go(
    world: World, groups: Any, begin: Path | None, end: Path | None, *, schedule: str = "LambdaLR", **settings: Any
) -> dict[str, list[float]]:
    """Train two steps, from a checkpoint and to one; returns each parameter's learning rates."""
    with penstock.Pipeline(copy.deepcopy(MODEL), ROWS, world=world, microbatches=2, **settings) as pipe:
        optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(groups(pipe) or parameters, lr=0.1, momentum=0.5))
        scheduler = SCHEDULES[schedule](optimizer)
        if begin is not None:
            pipe.load_checkpoint(begin, optimizer, scheduler)
        found: dict[str, list[float]] = {name: [] for name, _ in pipe.named_parameters()}
        for _ in range(2):
            loss = pipe.train_step(ROWS, LABELS, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*[float(loss)] * (schedule == "ReduceLROnPlateau"))
            for name, parameter in pipe.named_parameters():
                found[name] += [
                    group["lr"] for group in optimizer.param_groups if any(parameter is p for p in group["params"])
                ]
        if end is not None:
            pipe.save_checkpoint(end, optimizer, scheduler)
    return found


def both(first: int, then: int, groups: Any, folder: Path, **settings: Any) -> dict[str, list[float]]:
    """Two steps on so many stages, then two on others."""
    begun = in_threads(first, lambda world: go(world, groups, None, folder, stages=first, **settings))
    ended = in_threads(then, lambda world: go(world, changed(groups), folder, None, stages=then, **settings))
    rates: dict[str, list[float]] = {}
    for ranks in (begun, ended):
        joined = {name: values for rank in ranks for name, values in rank.items()}
        rates = {name: rates.get(name, []) + values for name, values in joined.items()}
    return rates


CASES = [
    (by_layer, 1, "LambdaLR"), (by_layer, 3, "LambdaLR"), (by_kind, 1, "LambdaLR"), (by_kind, 3, "LambdaLR"),
    *((by_layer, 2, schedule) for schedule in SCHEDULES),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "then", "schedule"), CASES)
def test_each_parameter_keeps_its_learning_rate(groups: Any, then: int, schedule: str, tmp_path: Path) -> None:
    whole = both(1, 1, groups, tmp_path / "whole", schedule=schedule)
    found = both(2, then, groups, tmp_path / "stages", schedule=schedule)
    assert found.keys() == whole.keys()
    assert all(rates == pytest.approx(whole[name]) for name, rates in found.items())
    assert len({tuple(rates) for rates in whole.values()}) > 1


def by_first_layer(pipe: Any) -> list[dict[str, Any]]:
    named = list(pipe.named_parameters())
    return [{"params": [p for name, p in named if (name[0] == "0") == first]} for first in (True, False)]


def test_learning_rates_that_differ_between_ranks(tmp_path: Path) -> None:
    begun = in_threads(2, lambda world: go(world, by_rank, None, tmp_path, cuts=["1:after"]))
    ended = in_threads(2, lambda world: go(world, changed(by_rank), tmp_path, None, cuts=["1:after"]))
    assert begun[1]["4.weight"] + ended[1]["4.weight"] == pytest.approx([0.05 * 0.9**step for step in range(1, 5)])
    with pytest.raises(UsageError, match=r"lr.* 0\.0?\d+ for \d"):
        in_threads(1, lambda world: go(world, by_rank, tmp_path, None, stages=1))
    (apart,) = in_threads(1, lambda world: go(world, by_first_layer, tmp_path, None, stages=1))  # the way out
    assert apart["0.weight"] == pytest.approx([0.1 * 0.9**step for step in range(3, 5)])
    assert apart["4.weight"] == pytest.approx([0.05 * 0.9**step for step in range(3, 5)])


def test_groups_that_were_one_are_refused(tmp_path: Path) -> None:
    in_threads(2, lambda world: go(world, lambda _: None, None, tmp_path, stages=2))
    with pytest.raises(UsageError, match=r"\d\.bias|\d\.weight"):
        in_threads(2, lambda world: go(world, by_layer, tmp_path, None, stages=2))


def test_replicas_of_groups_are_one(tmp_path: Path) -> None:
    in_threads(2, lambda world: go(world, by_layer, None, tmp_path, stages=1, replicas=2))
    (found,) = in_threads(1, lambda world: go(world, changed(by_layer), tmp_path, None, stages=1))
    assert found["2.bias"] == pytest.approx([rate_of("2") * 0.9**step for step in range(3, 5)])
