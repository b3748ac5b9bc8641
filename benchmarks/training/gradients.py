"""Gradients of every model and schedule against one process that accumulates the same microbatches."""

from typing import Any

import torch

from tests.learners import LOSSES, MODELS, REPLICAS, SCHEDULES, batches, captured, model, sgd
from tests.trainers import by_hand, errors, train

MICROBATCHES = 3


def gradient_errors(name: str) -> dict[str, float]:
    """Give the worst tensor's error for each way of working together, by that way; a model's stages are threads here.

    The error of a tensor is the norm of the difference over the norm of what one process gives, or over a
    thousandth of the largest gradient's where that is more.
    """
    given = batches(name, 1)
    torch.set_num_threads(1)
    found = {}
    for size, settings in (*SCHEDULES, *REPLICAS):
        replicas = settings.get("replicas", 1)
        loss_fn = LOSSES[name]
        expected = by_hand(model(name, torch.float32), given, sgd, loss_fn, [MICROBATCHES] * replicas)[1]
        got = train(captured(name, torch.float32), size, given, sgd, loss_fn, microbatches=MICROBATCHES, **settings)[1]
        found[_way(settings)] = max(errors(expected, got).values())
    return found


def gradient_rows() -> list[dict[str, Any]]:
    """Give a row for each model."""
    return [{"name": f"gradients, {name}", "errors": gradient_errors(name)} for name in MODELS]


def _way(settings: dict[str, Any]) -> str:
    stages, replicas = settings["stages"], settings.get("replicas", 1)
    return f"{settings.get('schedule', '1f1b')}, {stages} stages" + (f" x {replicas} replicas" if replicas > 1 else "")
