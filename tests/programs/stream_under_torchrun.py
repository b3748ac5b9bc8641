"""Streams in two processes of torchrun, of which only the first reads inputs and has outputs."""

import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import penstock


class Mine:
    def __iter__(self) -> Iterator[Tensor]:
        assert os.environ["RANK"] == "0", "inputs were touched in another process"
        torch.manual_seed(1)
        return iter([torch.randn(2, 8) for _ in range(6)])


torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).eval()
first = os.environ["RANK"] == "0"
for stages in (2, 3):
    with penstock.Pipeline(model, (torch.zeros(2, 8),), stages=stages, threads=1) as pipe:
        for _ in range(2):
            outputs = list(pipe.stream(Mine()))
            assert len(outputs) == (6 if first else 0)
            if first:
                assert all(torch.equal(a, model(b)) for a, b in zip(outputs, Mine(), strict=True))
                assert [s.num_microbatches for s in pipe.last_report.stages] == [6] * stages
        whole = pipe(torch.ones(3, 8)) if first else pipe(None)
        assert (whole is not None) == first
        if first:
            list(pipe.stream(Mine()))  # one that the others' scripts do not know of
try:
    with penstock.Pipeline(model, (torch.zeros(2, 8),), threads=1) as pipe:
        for _ in pipe.stream(Mine()):
            raise ValueError("the loop's own mistake")
except ValueError:
    assert first
except penstock.RunError as error:
    if first or "the loop's own mistake" not in str(error):
        raise
sys.stdout.write("fine\n")
