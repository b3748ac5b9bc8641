"""Trains on rows that a process of its own loads, of which those of the second batch take a minute each."""

import time

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import Dataset

import penstock
from tests.train.test_pipeline import images, small


class Slow(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= 8:
            time.sleep(60)
        return images(1)[0][0], int(images(1)[1][0])


pipe = penstock.Pipeline(small(), images(2)[0], microbatches=2, stages=1)
for x, y in pipe.loader(Slow(), batch_size=8, num_workers=1):
    pipe.train_step(x, y, F.cross_entropy)
    print("trained", flush=True)
