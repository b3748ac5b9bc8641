"""Row labels for results of the caller's own Python code, determined by calling it with other rows."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.graph.callbacks import Callback
from penstock.graph.row_labels import PLACE, ROWS
from penstock.values import Value


def label_callback(
    callback: Callback, values: Sequence[Value], labels: Sequence[Tensor], shapes: Sequence[Sequence[int]],
    sizes: Sequence[int], twice: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Return the labels of a callback's results for tensors with these labels.

    `sizes` are its other arguments, `twice` the same for a batch with twice as many rows. A result that changes with a
    row's elements depends on that row; a result that changes only with the sizes depends on the number of rows.
    """
    if callback.keeps:
        return list(labels)
    generator = torch.Generator().manual_seed(0)
    given = [_drawn(value, shape, generator) for value, shape in zip(values, shapes, strict=True)]

    def call(tensors: list[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same random numbers each time
            return callback.run(tensors, list(numbers))

    made = call([x.clone() for x in given], sizes)
    found = [torch.zeros(x.shape, dtype=torch.uint8) for x in made]
    for bit in [*(1 << row for row in range(ROWS)), PLACE]:
        changed = [
            torch.where((each & bit) > 0, _drawn(value, shape, generator), x)
            for x, each, value, shape in zip(given, labels, values, shapes, strict=True)
        ]
        _mark(found, made, call(changed, sizes), bit)
    if list(sizes) != list(twice):
        with contextlib.suppress(RuntimeError):  # a shape may not fit these tensors
            _mark(found, made, call([x.clone() for x in given], twice), PLACE)
    return found


def _drawn(value: Value, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return torch.randn(tuple(shape), generator=generator).to(value.dtype)
    return torch.randint(2, tuple(shape), generator=generator).to(value.dtype)


def _mark(found: Sequence[Tensor], made: Sequence[Tensor], again: Sequence[Tensor], bit: int) -> None:
    for labels, was, now in zip(found, made, again, strict=True):
        if was.shape != now.shape:
            labels.bitwise_or_(bit)
        else:
            labels.bitwise_or_(torch.where((was == now) | ((was != was) & (now != now)), 0, bit).to(torch.uint8))
