"""Row labels: for each element of a tensor, the rows of the batch that it depends on, as bits of one byte.

An element with label 0 depends on no row, with a single bit on that row only, with several bits on several rows. Labels
that are equal along a dimension are stored once, as an expanded tensor, so labels of large tensors take little memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 3  # number of rows in the labelled batch
PLACE = 128  # bit for a dependence on the position of a row in its batch, or on the number of rows


def no_label() -> Tensor:
    """Return the label of a tensor that depends on no row, such as a parameter."""
    return torch.zeros((), dtype=torch.uint8)


def row_labels(rank: int, dim: int = 0) -> Tensor:
    """Label the entries of one dimension with one bit each; the other dimensions have length 1."""
    bits = torch.tensor([1 << row for row in range(ROWS)], dtype=torch.uint8)
    return bits.view([ROWS if place == dim else 1 for place in range(rank)])


def join(*labels: Tensor) -> Tensor:
    """Combine labels element by element, as for an elementwise operator."""
    shape = torch.broadcast_shapes(*(each.shape for each in labels))
    joined = no_label()
    for each in labels:
        joined = joined | _once(each)
    return joined.expand(shape)


def fold(labels: Tensor, dims: Iterable[int]) -> Tensor:
    """Combine labels along dimensions, which are kept with length 1."""
    folded = labels
    for dim in sorted({dim % max(labels.dim(), 1) for dim in dims}) if labels.dim() else []:
        if folded.shape[dim] == 0:
            shape = [1 if place == dim else size for place, size in enumerate(folded.shape)]
            folded = no_label().expand(shape)
        elif folded.stride(dim) == 0:
            folded = folded.narrow(dim, 0, 1)
        while folded.shape[dim] > 1:
            half = folded.shape[dim] // 2
            halved = folded.narrow(dim, 0, half) | folded.narrow(dim, half, half)
            rest = folded.narrow(dim, 2 * half, folded.shape[dim] - 2 * half)
            folded = torch.cat([halved, rest], dim) if rest.shape[dim] else halved
    return folded


def total(*labels: Tensor) -> Tensor:
    """Combine all labels into one."""
    return join(no_label(), *(fold(each, range(each.dim())).reshape(()) for each in labels))


def per_row(labels: Tensor, rank: int) -> Tensor:
    """Combine the labels of each entry of dimension 0, for a result of rank `rank` with the same dimension 0."""
    return fold(labels, range(1, labels.dim())).reshape(labels.shape[0], *[1] * (rank - 1))


def are_rows(labels: Tensor, dim: int) -> bool:
    """Return True if the entries of a dimension are the rows of the batch, in order and independent."""
    if labels.dim() == 0 or labels.shape[dim] != ROWS:
        return False
    folded = fold(labels, [other for other in range(labels.dim()) if other != dim % labels.dim()]).flatten()
    return folded.tolist() == [1 << row for row in range(ROWS)]


def is_mixed(labels: Tensor) -> bool:
    """Return True if any element depends on several rows, or on the position of its row."""
    values = set(_once(labels).unique().tolist())
    return any(value & PLACE or value.bit_count() > 1 for value in values)


def varies(labels: Tensor, dim: int) -> bool:
    """Return True if the entries of a dimension depend on different rows."""
    if labels.dim() == 0 or labels.stride(dim) == 0 or labels.shape[dim] < 2:
        return False
    once = _once(labels)
    return bool((once != once.narrow(dim, 0, 1)).any())


def keep_once(labels: Tensor) -> Tensor:
    """Return the same labels, stored once along dimensions in which they are equal."""
    once = _once(labels)
    for dim in reversed(range(labels.dim())):
        if once.shape[dim] > 1 and not varies(once, dim):
            once = once.narrow(dim, 0, 1)
    return once.expand(labels.shape)


def label_constant(value: Tensor, twice: Tensor) -> Tensor:
    """Label a constant by its values for `ROWS` rows and for twice as many rows.

    A constant that is the same for each row, or repeats for each row, has the rows' labels along the dimension that
    grows with the batch; a constant of fixed size has no label; any other depends on the position.
    """
    grown = [dim for dim, (size, other) in enumerate(zip(value.shape, twice.shape, strict=True)) if size != other]
    if not grown:
        same = _same(value, twice)
        labels = torch.where(same, 0, PLACE).to(torch.uint8)
        return labels if labels.any() else no_label().expand(value.shape)
    dim = grown[0]
    if len(grown) > 1 or value.shape[dim] % ROWS or twice.shape[dim] != 2 * value.shape[dim]:
        return torch.tensor(PLACE, dtype=torch.uint8).expand(value.shape)
    each = value.shape[dim] // ROWS
    parts, further = (x.unflatten(dim, (x.shape[dim] // each, each)) for x in (value, twice))
    first = parts.narrow(dim, 0, 1)
    if not (_same(parts, first).all() and _same(further, first).all()):
        return torch.tensor(PLACE, dtype=torch.uint8).expand(value.shape)
    rows = row_labels(value.dim() + 1, dim).expand(*value.shape[:dim], ROWS, each, *value.shape[dim + 1 :])
    return rows.flatten(dim, dim + 1)


def _once(labels: Tensor) -> Tensor:
    """Narrow the dimensions along which labels are repeated."""
    for dim in range(labels.dim()):
        if labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def _same(value: Tensor, other: Tensor) -> Tensor:
    return (value == other) | ((value != value) & (other != other))


@dataclass(frozen=True, slots=True)
class Labelled:
    """An operand: its labels, and its value if it is a constant."""

    labels: Tensor
    value: Tensor | None = None


@dataclass(frozen=True, slots=True)
class OperatorCall:
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


def read_all(reading: OperatorCall) -> Tensor:
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
