"""Distillation: learning from a teacher's outputs in addition to the labels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from penstock.errors import UsageError
from penstock.recipes.tasks import Task, class_accuracy, class_loss, logits_of, scores_of
from penstock.terminal.progress import working
from penstock.zoo.models.models import load_model

TEMPERATURE = 2.0
_PART = 0.5  # weight of the teacher's part in the loss
_BATCH = 64


def taught(task: Task, name: str, teacher: Path) -> Task:
    """Return a classification task whose training rows have a teacher's logits after their labels.

    The loss is half the loss of the labels plus half the Kullback-Leibler divergence from the teacher's classes at a
    temperature of 2, times the square of the temperature (Hinton et al., Distilling the Knowledge in a Neural Network,
    2015).

    Raises `ModelError` if the weights do not fit, `UsageError` if the teacher has other classes.
    """
    model = load_model(name, weights=teacher, whole=True).module.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    training = _Taught(task.training, model)
    return replace(task, training=training, loss_fn=taught_loss, accuracy=taught_accuracy)


class _Taught(Dataset[Any]):
    """Rows whose label is a vector: the class, then the teacher's logits, computed once for all rows."""

    def __init__(self, rows: Any, teacher: torch.nn.Module) -> None:
        self._rows = rows
        found: list[Tensor] = []
        with working("computing the teacher's logits"), torch.no_grad():
            for inputs, _ in DataLoader(rows, batch_size=_BATCH):
                found.append(scores_of(teacher, inputs).float())
        self._logits = torch.cat(found)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self._rows[index]
        return inputs, torch.cat([torch.tensor([float(label)]), self._logits[index]])


def taught_loss(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    """Return the summed loss of labels and teacher, or only of labels if there is no teacher."""
    if targets.dim() == 1:
        return class_loss(output, targets)
    logits = logits_of(output).float()
    labels, wanted = targets[:, 0].long(), targets[:, 1:]
    if wanted.shape != logits.shape:
        raise UsageError(f"the model must have the teacher's {wanted.shape[1]} classes; got {logits.shape[1]}")
    own, _ = class_loss(logits, labels)
    told = functional.kl_div(
        (logits / TEMPERATURE).log_softmax(-1), (wanted / TEMPERATURE).softmax(-1), reduction="sum"
    )  # fmt: skip
    return (1 - _PART) * own + _PART * TEMPERATURE**2 * told, len(targets)


def taught_accuracy(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    """Count the rows that are classified correctly."""
    return class_accuracy(output, targets if targets.dim() == 1 else targets[:, 0].long())
