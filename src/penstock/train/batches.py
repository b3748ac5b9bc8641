"""Split one process's rows of a batch into microbatches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock import trees
from penstock.engine.placement import shares
from penstock.engine.training_stage import Sizes
from penstock.errors import RunError, UsageError
from penstock.graph.call import as_call, bind_inputs, build_output
from penstock.graph.fixed_batch import check_fixed
from penstock.graph.graph import Graph
from penstock.graph.rows import input_dims, take_rows
from penstock.graph.stages import output_values
from penstock.train.row_cut import RowCut
from penstock.values import BATCH, Size

# advice for a model whose rows interact
WHOLE = "create the pipeline with microbatches=1 and one replica"


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of the rows: its sizes, the model's inputs by name, and its labels."""

    sizes: Mapping[str, int]
    inputs: Mapping[str, Tensor]
    labels: Any


def bind(graph: Graph, inputs: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Check inputs against the capture and return them by name, with their sizes; raises `UsageError`."""
    tensors, sizes = bind_inputs(graph, *as_call(inputs))
    check_fixed(graph, sizes[BATCH])
    return {v.name: t for v, t in zip(graph.tensor_inputs(), tensors, strict=True)}, sizes


def cut_rows(
    graph: Graph, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], labels: Any, num_parts: int, cut: RowCut
) -> list[Microbatch]:
    """Split rows into `num_parts` microbatches that differ by at most one row."""
    dims = input_dims(graph) if num_parts > 1 else {}
    for dim in filter(None, dims.values()):
        for label in trees.tensors(labels):
            if label.dim() > dim and label.shape[0] == label.shape[dim] == sizes["batch"]:
                raise UsageError(
                    f"labels of {list(label.shape)} may have their rows in dimension 0, or {dim} as an input; pad the "
                    "other dimension, or use microbatches=1"
                )
    parts = shares(sizes["batch"], num_parts)
    return [
        Microbatch(
            {**sizes, "batch": len(rows)},
            {name: take_rows(x, dims.get(name), rows) for name, x in tensors.items()},
            labels_here,
        )
        for rows, labels_here in zip(parts, cut.parts(labels, sizes["batch"], parts), strict=True)
    ]


def largest(microbatches: Sequence[Microbatch]) -> dict[str, int]:
    """Return the largest size of each symbol."""
    return {name: max(m.sizes[name] for m in microbatches) for name in microbatches[0].sizes}


def sample_rows(
    graph: Graph, outputs: Sequence[Tensor], sizes: Sizes, rows: Sequence[int], noise: Sequence[float]
) -> Any:
    """Return a model's output for some rows of a microbatch, each row perturbed by its amount of `noise`.

    The noise is deterministic. Raises `RunError` if outputs have no row dimension.
    """
    fewer = {**sizes, "batch": len(rows)}
    parts = []
    for value, tensor in zip(output_values(graph), outputs, strict=True):
        places = [place for place, size in enumerate(value.shape) if isinstance(size, Size) and size.mentions("batch")]
        if not places:
            parts.append(tensor.detach())
            continue
        (place, *more), before, after = places, value.evaluate(sizes), value.evaluate(fewer)
        each = before[place] // sizes["batch"]
        if more or each * sizes["batch"] != before[place] or each * len(rows) != after[place]:
            raise RunError("an output of the model must have its rows in one dimension")
        part = _picked(tensor.detach(), place, each, rows)
        if any(noise) and part.is_floating_point():
            scale = torch.tensor(noise).repeat_interleave(each).view(-1, *[1] * (part.dim() - place - 1))
            drawn = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
            part = part + (_picked(drawn, place, each, rows) * scale).to(part.device, part.dtype)
        parts.append(part)
    return build_output(graph, parts, fewer)


def _picked(tensor: Tensor, place: int, each: int, rows: Sequence[int]) -> Tensor:
    """Return some rows of a dimension with `each` entries per row."""
    if isinstance(rows, range):
        return tensor.narrow(place, each * rows.start, each * len(rows))
    return torch.cat([tensor.narrow(place, each * row, each) for row in rows], place)
