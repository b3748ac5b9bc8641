"""Trains in two processes, of which the second is killed, and writes what the first is told."""

import os
import signal
import sys
from pathlib import Path

import torch.nn.functional as F  # noqa: N812

import penstock
from tests.train.test_pipeline import images, small

pipe = penstock.Pipeline(small(), images(2)[0], microbatches=2, stages=int(sys.argv[1]))
x, y = images(8)
try:
    for step in range(1000):
        if step == 3 and pipe.trainer.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.train_step(x, y, F.cross_entropy)
except penstock.PenstockError as error:
    Path(sys.argv[2]).write_text(f"{type(error).__name__} {error}")
