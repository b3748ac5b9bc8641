"""Streams a model whose weights are in a file, and prints the memory of this process and of its workers as JSON."""

import json
import os
import sys
from pathlib import Path

import sympy  # noqa: F401
import timm  # noqa: F401
import torch
import torch._dynamo
import torch.export

import penstock
import penstock.stream.streaming_pipeline
from penstock.graph.cuts import divide
from penstock.zoo.models.models import load_model


def read(pid: int, field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


before = read(os.getpid(), "VmHWM")
zoo = load_model(sys.argv[1], weights=Path(sys.argv[2]))
image = torch.randn(1, 3, 224, 224)
with penstock.Pipeline(zoo.module, (image,), stages=4, threads=1, weights=zoo.weights) as pipe:
    list(pipe.stream(image for _ in range(4)))
    stages = divide(pipe.graph, pipe.cuts)
    workers = pipe._streaming.world.workers
    assert workers is not None
    print(json.dumps({
        "feeder": read(os.getpid(), "VmHWM") - before,
        "workers": [read(pid, "RssAnon") for pid in workers.pids],
        "stages": [program.state_bytes() for program in stages],
    }))  # fmt: skip
