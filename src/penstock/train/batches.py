"""One process's rows of a batch, cut into microbatches; a microbatch's loss as a sum and what it is a sum over."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.engine.placement import shares
from penstock.errors import RunError, UsageError
from penstock.graph.call import as_call, bind_inputs
from penstock.graph.expressions import Size
from penstock.graph.graph import Graph

LossFunction = Callable[[Any, Any], Any]
# what to do with a model of which rows interact
WHOLE = "give the pipeline microbatches=1 and one replica"


def loss_and_count(loss_fn: LossFunction | None, output: Any, labels: Any, num_rows: int) -> tuple[Tensor, float]:
    """Compute the loss of one microbatch as (sum, count).

    `loss_fn` may return a mean, which counts once for each row, or `(sum, count)`, which is exact where
    rows weigh differently, as with `ignore_index`. Without it the model's own loss is taken, a mean.

    Raises `RunError` where `loss_fn` fails or returns neither.
    """
    if loss_fn is None:
        return own_loss(output) * num_rows, float(num_rows)
    try:
        result = loss_fn(output, labels)
    # whatever the caller's function raises, the reader needs to know what it was given
    except Exception as error:
        given = [tuple(leaf.shape) for leaf in pytree.tree_leaves(labels) if isinstance(leaf, Tensor)]
        raise RunError(
            f"loss_fn failed: {(str(error).splitlines() or [repr(error)])[0]} (the labels are {given}); "
            "check that labels fit the model's output"
        ) from error
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and result[0].dim() == 0:
        return result[0], float(result[1])
    if isinstance(result, Tensor) and result.dim() == 0:
        return result * num_rows, float(num_rows)
    shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise RunError(f"loss_fn must return a scalar mean or (sum, count), not {shape}; use reduction='mean' or 'sum'")


def own_loss(output: Any) -> Tensor:
    """Find the loss in what a model returns, as Hugging Face's do when they are given labels."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        loss = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise RunError("the model returns no loss of its own; give train_step a loss_fn, or the model its labels")
    return loss


def check_labels(labels: Any, num_rows: int) -> None:
    """Check that labels have a row for each row of the inputs; raises `UsageError`."""
    for leaf in pytree.tree_leaves(labels):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != num_rows):
            raise UsageError(
                f"the labels are {tuple(leaf.shape)} but the inputs have {num_rows} rows; give one label for each row"
            )


def take_rows(tree: Any, rows: range) -> Any:
    """Take some rows of every tensor."""
    return pytree.tree_map(lambda x: x[rows.start : rows.stop] if isinstance(x, Tensor) and x.dim() else x, tree)


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
