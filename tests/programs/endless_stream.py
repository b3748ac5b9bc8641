"""Streams without an end, and says when it is running."""

import itertools

import torch
from torch import nn

import penstock

x = torch.randn(2, 8)
pipe = penstock.Pipeline(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (x,), stages=1, threads=1)
for index, _ in enumerate(pipe.stream(itertools.repeat(x))):
    if index == 20:
        print("running", flush=True)
