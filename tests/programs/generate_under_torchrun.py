"""Generates in two processes of torchrun, of which only the first has the model and requests."""

import os
import sys

import torch

import penstock
from tests.generate.decoders import decoder, expected, prompts

torch.set_num_threads(1)
rank = os.environ["RANK"]
model = decoder("gpt2")
with penstock.Generator(model if rank == "0" else None, max_length=64) as generator:
    assert generator.generates == (rank == "0")
    if generator.generates:
        for prompt in prompts(3, 20):
            wanted = expected(model, prompt, max_new_tokens=9, do_sample=False)
            assert generator.submit(prompt, max_new_tokens=9).result() == wanted
sys.stdout.write("fine\n")
