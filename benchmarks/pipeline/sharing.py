"""What processes on two cores of one machine take from each other: `python -m benchmarks.pipeline.sharing --json FILE`.

    core 0   . pass . pass . pass .     alone, and while core 1 does the same, in turns
    core 1   .      . pass .      .

Hosts of a lab lie on one machine. What this finds is why their stages, which compute at the same time, together
take longer than one host's whole model, which computes alone.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.__main__ import environment
from penstock.zoo.models.models import load_model

MODELS = ("timm:deit_small_patch16_224", "timm:resnet50", "timm:vit_base_patch16_224", "hf:gpt2")


def compute(core: int, name: str, pipe: Connection) -> None:
    """Run so many rows as asked for each time, on one core, and answer with the CPU seconds of a row."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    zoo = load_model(name, whole=True)
    args = [each[:1] for each in zoo.example_args]
    kwargs = {key: each[:1] for key, each in zoo.example_kwargs.items()}
    module = zoo.module.eval()
    with torch.no_grad():
        module(*args, **kwargs)
        pipe.send(0.0)
        while (rows := pipe.recv()) is not None:
            begin = time.thread_time()
            for _ in range(rows):
                module(*args, **kwargs)
            pipe.send((time.thread_time() - begin) / rows)


def compare(name: str, rows: int, rounds: int) -> dict[str, Any]:
    """Return the CPU seconds of a row alone, and beside the same on the other core; the medians of rounds."""
    context = multiprocessing.get_context("spawn")
    first, second = (context.Pipe() for _ in range(2))
    cores = sorted(os.sched_getaffinity(0))[:2]
    processes = [
        context.Process(target=compute, args=(core, name, own[1]), daemon=True)
        for core, own in zip(cores, (first, second), strict=True)
    ]
    for process in processes:
        process.start()
    pipes = [first[0], second[0]]
    for pipe in pipes:
        pipe.recv()
    alone, beside = [], []
    for _ in range(rounds):
        pipes[0].send(rows)
        alone.append(pipes[0].recv())
        pipes[1].send(2 * rows)  # until after the first has ended
        time.sleep(0.05)
        pipes[0].send(rows)
        beside.append(pipes[0].recv())
        pipes[1].recv()
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(30)
    pairs = [b / a for a, b in zip(alone, beside, strict=True)]
    return {"model": name, "alone_s": statistics.median(alone), "beside_s": statistics.median(beside),
            "longer": statistics.median(pairs) - 1, "least": min(pairs) - 1, "most": max(pairs) - 1}  # fmt: skip


def main() -> None:
    """Measure the models and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline.sharing")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    rows = []
    print("| model | alone, ms of CPU a row | beside another | longer |\n| --- | --- | --- | --- |")
    for name in MODELS:
        row = compare(name, given.rows, given.rounds)
        rows.append(row)
        print(f"| {name} | {1e3 * row['alone_s']:.0f} | {1e3 * row['beside_s']:.0f} | {row['longer']:+.1%} "
              f"({row['least']:+.1%} to {row['most']:+.1%}) |", flush=True)  # fmt: skip
    given.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
