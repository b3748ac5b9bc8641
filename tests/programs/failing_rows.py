"""Trains on rows whose loading fails."""

import torch
from torch import Tensor

import penstock
from tests.programs.rows import WIDE, Rows, first, identity, numbers


def change(_row: Tensor) -> Tensor:
    raise FileNotFoundError("row.png")


with penstock.Pipeline(identity(), torch.zeros(2, WIDE), microbatches=2) as pipe:
    for x, y in pipe.loader(Rows(numbers(), change), batch_size=8):
        pipe.train_step(x, y, first)
