"""The place in the data that a checkpoint keeps, with several loaders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import penstock
from penstock.train.checkpoint_folder import read_index

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.arange(40.0).view(40, 1).repeat(1, 4)
DATA = TensorDataset(ROWS, torch.zeros(40, dtype=torch.long))


@pytest.fixture
def pipes() -> Iterator[Any]:
    made: list[penstock.Pipeline] = []

    def make() -> penstock.Pipeline:
        torch.manual_seed(0)
        made.append(penstock.Pipeline(nn.Linear(4, 3).train(), ROWS[:4], microbatches=2))
        return made[-1]

    yield make
    for pipe in made:
        pipe.close()


def first(batch: tuple[Tensor, Tensor]) -> int:
    return int(batch[0][0, 0])


def train(pipe: penstock.Pipeline, loader: Any, steps: int) -> list[int]:
    seen = []
    for _, (rows, labels) in zip(range(steps), loader, strict=False):
        pipe.train_step(rows, labels, F.cross_entropy)
        seen.append(first((rows, labels)))
    return seen


@pytest.mark.parametrize("validates", [False, True])
def test_loader_that_was_trained_on_resumes(pipes: Any, tmp_path: Path, validates: bool) -> None:
    pipe = pipes()
    training, validation = pipe.loader(DATA, batch_size=4), pipe.loader(DATA, batch_size=8)
    for step, batch in enumerate(training):
        pipe.train_step(*batch, F.cross_entropy)
        if step == 2:
            if validates:
                for images, labels in validation:
                    pipe.evaluate(images, labels, F.cross_entropy)
            pipe.save_checkpoint(tmp_path / "c")
            break
    index = read_index(tmp_path / "c")
    assert index.trained == 0
    place = index.loaders[0]
    assert (place.epoch, place.position) == (0, 3)
    again = pipes()
    loaders = again.loader(DATA, batch_size=4), again.loader(DATA, batch_size=8)
    again.load_checkpoint(tmp_path / "c")
    assert train(again, loaders[0], 2) == [12, 16]
    assert first(next(iter(loaders[1]))) == 0


def test_every_trained_loader_resumes(pipes: Any, tmp_path: Path) -> None:
    pipe = pipes()
    first_task, second_task = pipe.loader(DATA, batch_size=4), pipe.loader(DATA, batch_size=8)
    ones, others = iter(first_task), iter(second_task)
    for _ in range(3):
        pipe.train_step(*next(ones), F.cross_entropy)
    pipe.train_step(*next(others), F.cross_entropy)
    pipe.save_checkpoint(tmp_path / "c")
    again = pipes()
    loaders = again.loader(DATA, batch_size=4), again.loader(DATA, batch_size=8)
    again.load_checkpoint(tmp_path / "c")
    assert train(again, loaders[0], 1) == [12]
    assert train(again, loaders[1], 1) == [8]
