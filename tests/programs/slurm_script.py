"""A script of a user's own, which streams and trains alone or as one of a job's processes, and writes what it found."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import penstock

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
rows, labels = torch.randn(12, 8), torch.arange(12) % 4
with penstock.Pipeline(model.eval(), (rows[:1],), stages=2) as pipe:
    outputs = [output.tolist() for output in pipe.stream(rows.split(1))]
stages = 2 if "RANK" in os.environ else 1
with penstock.Pipeline(model.train(), (rows,), stages=stages, microbatches=2) as pipe:
    optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    losses = []
    for _ in range(3):
        losses.append(float(pipe.train_step(rows, labels, nn.functional.cross_entropy)))
        optimizer.step()
        optimizer.zero_grad()
found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURMD_NODENAME")}
Path(sys.argv[1], f"{found['RANK']}.json").write_text(json.dumps(found | {"outputs": outputs, "losses": losses}))
