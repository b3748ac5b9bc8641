"""Streams, and leaves the pipeline open: at the end, in the middle of a stream, or in one of two processes."""

import os
import sys
import time

import torch
from torch import nn

import penstock

x = torch.randn(2, 8)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).eval()
pipe = penstock.Pipeline(model, (x,), stages=2, threads=1)
rank, how = os.environ.get("RANK", "0"), sys.argv[1]
if how == "middle":
    stream = pipe.stream([x] * 50)
    taken = [next(stream)]
else:
    taken = list(pipe.stream([x] * 5))
if how == "more" and rank == "0":  # of which the others' scripts know nothing
    time.sleep(2.0)
    taken += list(pipe.stream([x] * 5))
if how == "close" and rank != "0":
    pipe.close()
if how == "raise" and rank == "0":
    raise ValueError("the script's own mistake")
sys.stdout.write(f"{rank} took {len(taken)}\n")
