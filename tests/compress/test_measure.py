"""What a model does on a runtime, one image and several at a time."""

import torch
from torch import nn

from penstock.compress.measure import Examples, OnRuntimes

INPUTS = list(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)))


def test_every_image_counts_however_many_are_taken_at_a_time() -> None:
    model = nn.Linear(5, 3).eval()
    with torch.no_grad():
        labels = model(torch.stack(INPUTS)).argmax(1).tolist()
    labels[-1] = (labels[-1] + 1) % 3  # in the last microbatch, which is ragged
    on = OnRuntimes(model, (INPUTS[0][None],))
    for rows in (1, 3, 16):
        found = on.measure("eager", Examples(INPUTS, labels), rows)
        assert found.accuracy == 6 / 7
        assert found.rows_per_s > 0
