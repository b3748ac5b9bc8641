"""Asks for fewer stages than there are processes, and ends well where that is refused in one line."""

import torch

import penstock

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
try:
    with penstock.Pipeline(model, (torch.zeros(1, 4),), stages=2) as pipe:
        list(pipe.stream([torch.zeros(1, 4)]))
except penstock.PenstockError as error:
    if "rank 2" not in str(error) or "\n" in str(error):
        raise
else:
    raise SystemExit("not refused")
