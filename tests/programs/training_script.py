"""Trains with settings from the command line, alone or in several processes, and writes what each process found."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import TensorDataset

import penstock
from tests.train.test_pipeline import images, small

rank = int(os.environ.get("RANK", "0"))
for number, settings in enumerate(json.loads(sys.argv[1])):
    torch.manual_seed(rank)  # every process makes other weights
    model, data = small(), images(settings.pop("rows", 22))
    pipe = penstock.Pipeline(model, torch.zeros(2, 3, 8, 8), **settings)
    optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for _ in range(2):
        for x, y in pipe.loader(TensorDataset(*data), batch_size=8, shuffle=True):
            loss = pipe.train_step(x, y, loss_fn=F.cross_entropy)
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(float(loss))
    x, y = images(5)
    correct = pipe.evaluate(x, y, lambda out, y: (out.argmax(-1).eq(y).sum().float(), len(y)))
    output = pipe(x)
    pipe.save(f"{sys.argv[2]}/model{number}.safetensors")
    Path(sys.argv[2], f"rank{rank}-{number}.json").write_text(json.dumps([losses, correct, float(output.sum())]))
    pipe.close()
