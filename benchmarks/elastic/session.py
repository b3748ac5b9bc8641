"""What runs on every host, or alone: one way to fine-tune, epoch after epoch, as a user's script would."""

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import penstock
from benchmarks.elastic.subjects import loss_fn, make_subject, right
from penstock.resources import resident_bytes
from penstock.spec.cluster import parse_cluster
from penstock.spec.profile import read_profile
from penstock.train.trainer import evaluate_all

_STEP = ("load_s", "forward_s", "backward_s", "wait_s", "synchronize_s", "synchronized_bytes", "num_synchronizations")


def main() -> None:
    """Train as the file says, and write what came of it beside it."""
    file = Path(sys.argv[1])
    found = train(json.loads(file.read_text()))
    file.with_suffix(f".{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Fine-tune; returns seconds, accuracy and plan of each epoch, and where this process's time went."""
    torch.set_num_threads(given.get("threads", 1))
    model, training, validation = make_subject(given)
    if "rows" in given:
        training = TensorDataset(*(tensor[: given["rows"]] for tensor in training.tensors))
    example = training[0][0][None].repeat(2, *[1] * training[0][0].dim())
    with penstock.Pipeline(
        model, (example,), stages=given.get("stages"), replicas=given.get("replicas"),
        microbatches=given.get("microbatches"), seed=given["seed"], threads=given.get("threads", 1),
    ) as pipe:  # fmt: skip
        optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=given["lr"], fused=True))
        loader = pipe.loader(training, batch_size=given["batch_size"], shuffle=True)
        num_steps = given["epochs"] * len(loader)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (1 + math.cos(math.pi * min(step, num_steps) / num_steps)) / 2
        )
        kept = pipe.loader(validation, batch_size=given["batch_size"])
        elastic = None
        if given.get("elastic") is not None:
            elastic = pipe.elastic(
                loader, epochs=given["epochs"], profile=read_profile(given["profile"]) if "profile" in given else None,
                cluster=parse_cluster(given["cluster"]) if "cluster" in given else None, **given["elastic"],
            )  # fmt: skip
        seconds: list[float] = []
        accuracy: list[float] = []
        spent = dict.fromkeys(_STEP, 0.0)
        for epoch in range(given["epochs"]):
            begin = time.perf_counter()
            for inputs, labels in loader:
                pipe.train_step(inputs, labels, loss_fn)
                for name in _STEP:
                    spent[name] += getattr(pipe.last_step, name)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            seconds.append(time.perf_counter() - begin)
            if given["validate"] == "always" or (given["validate"] == "end" and epoch + 1 == given["epochs"]):
                totals = [evaluate_all(pipe.trainer, inputs, labels, [right])[0] for inputs, labels in kept]
                accuracy.append(sum(count for count, _ in totals) / sum(rows for _, rows in totals))
                if elastic is not None:
                    elastic.validated(accuracy=accuracy[-1])
        return {
            "seconds": seconds, "accuracy": accuracy, "spent": spent, "steps": pipe.trainer.step, "rows": len(training),
            "changes": [dataclasses.asdict(change) for change in elastic.changes] if elastic is not None else [],
            "memory_bytes": resident_bytes(), "peak_memory_bytes": pipe.last_step.peak_memory_bytes,
        }  # fmt: skip


if __name__ == "__main__":
    main()
