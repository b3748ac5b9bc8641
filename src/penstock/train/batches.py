"""One process's rows of a batch, cut into microbatches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.placement import shares
from penstock.errors import UsageError
from penstock.graph.call import as_call, bind_inputs
from penstock.graph.expressions import Size
from penstock.graph.graph import Graph
from penstock.train.losses import take_rows


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of the rows: its sizes, the model's inputs by name, and its labels."""

    sizes: Mapping[str, int]
    inputs: Mapping[str, Tensor]
    labels: Any


def bind(graph: Graph, inputs: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Check inputs against the capture and return them by name, with their sizes; raises `UsageError`."""
    tensors, sizes = bind_inputs(graph, *as_call(inputs))
    return {v.name: t for v, t in zip(graph.tensor_inputs(), tensors, strict=True)}, sizes


def cut_rows(
    graph: Graph, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], labels: Any, num_parts: int
) -> list[Microbatch]:
    """Cut rows into `num_parts` microbatches, which differ by one row at most."""
    batched = {value.name: _is_batched(value.shape) for value in graph.tensor_inputs()}
    return [
        Microbatch(
            {**sizes, "batch": len(rows)},
            {name: take_rows(tensor, rows) if batched[name] else tensor for name, tensor in tensors.items()},
            take_rows(labels, rows),
        )
        for rows in shares(sizes["batch"], num_parts)
    ]


def _is_batched(shape: Sequence[int | Size]) -> bool:
    if not shape or isinstance(shape[0], int):
        return False
    if shape[0].expression != "batch":
        raise UsageError("an input whose first dimension is a multiple of the batch cannot be cut into microbatches")
    return True


def largest(microbatches: Sequence[Microbatch]) -> dict[str, int]:
    """Return the largest size of each symbol."""
    return {name: max(m.sizes[name] for m in microbatches) for name in microbatches[0].sizes}
