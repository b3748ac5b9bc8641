"""A call of an operator, as the label rules see it: see `row_rules`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.graph.row_labels import PLACE, fold, total


@dataclass(frozen=True, slots=True)
class Labelled:
    """An operand: its labels, and its value if it is a constant."""

    labels: Tensor
    value: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A call of an operator: its arguments by name, and the shape of its (first) result."""

    name: str
    operator: Any
    named: Mapping[str, Any]
    shape: tuple[int, ...]
    apart: bool  # True if batch statistics are computed per microbatch, as in training

    def tensors(self) -> list[Tensor]:
        """Return the labels of all operands."""
        return [each.labels for each in flat(list(self.named.values()))]

    def first(self) -> Tensor:
        """Return the labels of the first operand."""
        return self.tensors()[0]

    def others(self) -> Tensor:
        """Return the combined labels of the operands after the first, such as weights: usually no label."""
        return total(*self.tensors()[1:])


def over(labels: Tensor, dims: Sequence[int], rank: int) -> Tensor:
    """Combine labels along dimensions, which are kept or removed according to the result's rank."""
    folded = fold(labels, dims)
    dims = sorted({dim % labels.dim() for dim in dims}) if labels.dim() else []
    return folded.squeeze(tuple(dims)) if rank == labels.dim() - len(dims) else folded


def read_all(reading: Reading) -> Tensor:
    """Combine the labels of all operands: safe for every operator, too pessimistic for most."""
    return total(*reading.tensors())


def flat(items: Any) -> list[Labelled]:
    """Return the operands in an argument, however nested."""
    if isinstance(items, Labelled):
        return [items]
    return [each for item in items for each in flat(item)] if isinstance(items, (list, tuple)) else []


def place_label() -> Tensor:
    """Return the label of a dependence on the position of a row."""
    return torch.tensor(PLACE, dtype=torch.uint8)
