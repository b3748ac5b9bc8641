"""Checkpoints that are gone back to: nothing of later steps stays, and all optimizers and schedulers go back."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import ModelError, UsageError
from penstock.group.world import World
from penstock.pipeline import Pipeline
from penstock.train.checkpoint import load_checkpoint
from penstock.train.checkpoint_folder import check_whole, read_index
from tests.trainers import in_threads

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
MAKE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


_ONE_AT_A_TIME = threading.Lock()  # threads share torch's random numbers


def model() -> nn.Module:
    with _ONE_AT_A_TIME:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).train()


def steps(pipe: Pipeline, optimizers: list[torch.optim.Optimizer], schedulers: list[Any], num: int) -> list[float]:
    losses = []
    for _ in range(num):
        losses.append(float(pipe.train_step(X, Y, F.cross_entropy)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return losses


def on_two(script: Callable[[Pipeline], Any]) -> list[Any]:
    def run(world: World) -> Any:
        with Pipeline(model(), X, stages=2, microbatches=2, world=world) as pipe:
            return script(pipe)

    return in_threads(2, run)


@pytest.mark.parametrize("name", MAKE)
def test_an_optimizer_forgets_the_steps_that_are_taken_back(name: str, tmp_path: Path) -> None:
    def script(pipe: Pipeline) -> tuple[list[float], list[float]]:
        optimizer = pipe.optimizer(MAKE[name])
        pipe.save_checkpoint(tmp_path / "begin", optimizer)
        first = steps(pipe, [optimizer], [], 4)
        pipe.load_checkpoint(tmp_path / "begin", optimizer)
        assert not optimizer.state
        return first, steps(pipe, [optimizer], [], 4)

    for first, again in on_two(script):
        assert first == again


def test_several_optimizers_and_schedulers_go_back(tmp_path: Path) -> None:
    def split(pipe: Pipeline) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        weights = pipe.optimizer(lambda ps: torch.optim.AdamW([p for p in ps if p.dim() > 1], lr=0.05))
        biases = pipe.optimizer(lambda ps: torch.optim.SGD([p for p in ps if p.dim() == 1], lr=0.1, momentum=0.9))
        optimizers = [weights, biases]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]

    def script(pipe: Pipeline) -> tuple[list[float], list[float], list[float]]:
        optimizers, schedulers = split(pipe)
        steps(pipe, optimizers, schedulers, 3)
        pipe.save_checkpoint(tmp_path / "third", optimizers, schedulers)
        first = steps(pipe, optimizers, schedulers, 4)
        pipe.load_checkpoint(tmp_path / "third", optimizers, schedulers)
        rates = [group["lr"] for each in optimizers for group in each.param_groups]
        return first, steps(pipe, optimizers, schedulers, 4), rates

    def later(pipe: Pipeline) -> list[float]:
        optimizers, schedulers = split(pipe)
        pipe.load_checkpoint(tmp_path / "third", optimizers, schedulers)
        return steps(pipe, optimizers, schedulers, 4)

    for (first, again, rates), resumed in zip(on_two(script), on_two(later), strict=True):
        assert first == again == resumed
        assert rates == [0.025, 0.05]


def test_load_requires_the_saved_optimizers_and_schedulers(tmp_path: Path) -> None:
    def script(pipe: Pipeline) -> None:
        optimizer = pipe.optimizer(MAKE["adamw"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        steps(pipe, [optimizer], [scheduler], 1)
        pipe.save_checkpoint(tmp_path / "one", optimizer, scheduler)
        with pytest.raises(UsageError):
            pipe.load_checkpoint(tmp_path / "one", optimizer, [scheduler, scheduler])
        with pytest.raises(UsageError):
            pipe.load_checkpoint(tmp_path / "one", [optimizer, optimizer], scheduler)
        other = torch.optim.SGD([p for _, p in pipe.named_parameters()], lr=0.1)
        with pytest.raises(UsageError):
            pipe.save_checkpoint(tmp_path / "two", [optimizer, other])

    on_two(script)


@pytest.mark.parametrize("stage", ["stage-0", "stage-1"])
def test_files_of_two_saves_are_not_one_checkpoint(stage: str, tmp_path: Path) -> None:
    """As where two runs write to one folder at a time: each file is whole, of the right size and shapes."""

    def save(folder: Path) -> None:
        on_two(lambda pipe: pipe.save_checkpoint(folder))

    save(tmp_path / "mine")
    save(tmp_path / "other")
    check_whole(tmp_path / "mine", read_index(tmp_path / "mine"))
    shutil.rmtree(tmp_path / "mine" / stage)
    shutil.copytree(tmp_path / "other" / stage, tmp_path / "mine" / stage)
    with pytest.raises(ModelError) as caught:
        check_whole(tmp_path / "mine", read_index(tmp_path / "mine"))
    assert stage in str(caught.value)


def test_loss_during_a_save_keeps_checkpoints_consistent(tmp_path: Path) -> None:
    """Where processes go back while a checkpoint is being written, it holds one moment or the other."""

    def script(pipe: Pipeline) -> None:
        optimizer = pipe.optimizer(MAKE["adamw"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        trainer = pipe.trainer
        pipe.save_checkpoint(tmp_path / "early", optimizer, scheduler)
        steps(pipe, [optimizer], [scheduler], 3)
        together, calls = trainer.together, []

        def goes_back(work: Callable[[], dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
            calls.append(work)
            if len(calls) == 2:  # as a loss between two exchanges of the save does
                trainer.together = together  # type: ignore[method-assign]
                load_checkpoint(trainer, tmp_path / "early", optimizer, scheduler)
            return together(work, *args, **kwargs)

        trainer.together = goes_back  # type: ignore[method-assign]
        pipe.save_checkpoint(tmp_path / "late", optimizer, scheduler)

    on_two(script)
    index = read_index(tmp_path / "late")
    assert index.schedulers[0]["last_epoch"] == index.step


def test_rows_of_weights_do_not_depend_on_the_save(tmp_path: Path) -> None:
    def script(pipe: Pipeline) -> dict[str, Tensor]:
        pipe.save_checkpoint(tmp_path / "here")
        pipe.load_checkpoint(tmp_path / "here")
        return {name: p.detach().clone() for name, p in pipe.named_parameters()}

    expected = model().state_dict()
    for held in on_two(script):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items())
