"""Metrics of an elastic training, written by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WHY = "gradient-norms froze 4 more; 2 × 2 is predicted to do 61 images/s, 4 × 1 does 44"


def plan(step: int = 0, **values: Any) -> dict[str, Any]:
    """A line of metrics that tells of a plan."""
    return {
        "kind": "plan", "step": step, "epoch": 0, "frozen_layers": 0, "num_layers": 12, "stages": 4, "replicas": 1,
        "cached": False, "migrate_s": 0.0, "moved_bytes": 0, "fill_s": 0.0, "why": "the first plan", **values,
    }  # fmt: skip


def epoch(number: int, rate: float = 40.0, accuracy: float | None = 0.5, **values: Any) -> dict[str, Any]:
    """A line of metrics that tells of an epoch of ten steps, as `penstock train` writes it."""
    return {
        "kind": "epoch", "step": 10 * number + 10, "epoch": number, "batch_rows": 32, "unit": "images",
        "train_loss": 1.5, "train_s": 8.0, "units_per_s": rate, "validation_loss": 1.2, "accuracy": accuracy,
        "peak_memory_bytes": [10**8], "sent_bytes": [10**6], **values,
    }  # fmt: skip


def trained() -> list[dict[str, Any]]:
    """Twelve epochs in which four stages become one, four replicas and a cache."""
    sizes = [(0, 4, 1), (4, 2, 2), (7, 2, 2), (9, 1, 4), (10, 1, 4), (11, 1, 4)]
    lines = [plan()]
    for number in range(12):
        _, stages, replicas = sizes[min(number, 5)]
        lines += [{"kind": "step", "step": step, "loss": 1.5} for step in range(10 * number + 1, 10 * number + 11)]
        lines.append(epoch(number, 30.0 * replicas + 4 * number + (60 if number > 3 else 0), 0.9 - 0.6 / (number + 1)))
        if number < 5:
            layers, stages, replicas = sizes[number + 1]
            change = (stages, replicas) != sizes[number][1:]
            lines.append(plan(
                10 * number + 10, epoch=number, frozen_layers=layers, stages=stages, replicas=replicas,
                cached=number >= 2, migrate_s=0.8 if change else 0.0, moved_bytes=12_400_000 if change else 0,
                fill_s=2.5 if number == 2 else 0.0, why=WHY if change else "the same plan is still the best",
            ))  # fmt: skip
    return lines


def write_metrics(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Write a folder's metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
