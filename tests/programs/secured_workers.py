"""Streams with two workers of this machine that prove a key."""

import torch

from penstock.pipeline import Pipeline
from tests.worlds import tower, tower_inputs

model, inputs = tower(), tower_inputs(30)
torch.set_num_threads(1)
with Pipeline(model, inputs[0], stages=2, threads=1) as pipe:
    world = pipe._streaming.world
    assert world.secured
    outputs = list(pipe.stream(inputs))
with torch.no_grad():
    assert all(torch.equal(one, model(*two)) for one, two in zip(outputs, inputs, strict=True))
