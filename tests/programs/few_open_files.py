"""Streams with limits of open files, and prints the number of outputs or what went wrong."""

import resource
import sys

import torch

import penstock

soft, hard = int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]).eval()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    with penstock.Pipeline(model, torch.ones(1, 4), stages=3) as pipe:
        print(len(list(pipe.stream([torch.ones(1, 4)] * 3))), "outputs")
except penstock.PenstockError as error:
    print(type(error).__name__, error)
