"""Rows of a batch: inputs, labels and examples are cut by rows, into microbatches."""

import enum
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from penstock import trees
from penstock.engine.placement import shares
from penstock.engine.stages import MicrobatchRows, Sizes
from penstock.errors import RunError, UsageError
from penstock.graph.call import as_call, bind_inputs, build_output
from penstock.graph.cuts import output_values
from penstock.graph.graph import Graph, check_fixed
from penstock.graph.rows import input_dims, take_rows
from penstock.values import BATCH, Size

# types of leaves without rows, which all rows share
_SETTINGS = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, enum.Enum,
             pathlib.PurePath)  # fmt: skip


class RowCut:
    """A row slicer for trees of the same structure, batch after batch.

    A tensor or an array is cut along its first dimension. A list or tuple either holds such tensors, each of which is
    cut, or it has one entry for each row. If both are possible, an earlier batch decides; without an earlier batch, a
    sequence that holds tensors directly has its tensors cut, and a sequence of dicts, texts or lists is cut by entries.
    Unless `exact`, values without rows are unchanged.

    Example:
        cut = RowCut()
        first, second = cut.parts(labels, 8, [range(4), range(4, 8)])
    """

    def __init__(self, *, exact: bool = True) -> None:
        self._exact = exact
        self._inside: dict[tuple[Any, ...], bool] = {}  # by path: how a sequence was cut when that was unambiguous

    def parts(self, tree: Any, num_rows: int, parts: Sequence[Sequence[int]]) -> list[Any]:
        """Return the rows of each part; raises `UsageError` unless labels have `num_rows` rows."""
        if self._exact:
            self.check(tree, num_rows)
        if [list(part) for part in parts] == [list(range(num_rows))]:
            return [tree]
        return [self._take(tree, num_rows, rows, ()) for rows in parts]

    def check(self, tree: Any, num_rows: int, path: tuple[Any, ...] = ()) -> None:
        """Raise `UsageError` unless labels have `num_rows` rows."""
        if isinstance(tree, (Tensor, np.ndarray)):
            if not _is_nested(tree) and not _has_length(tree, num_rows):
                raise UsageError(
                    f"the labels are {tuple(tree.shape)} but the inputs have {num_rows} rows; "
                    "give one label for each row"
                )
        elif (entries := self._entries(tree)) is not None and not self._by_entries(tree, num_rows, path):
            for key, value in entries:
                self.check(value, num_rows, (*path, key))

    def _take(self, tree: Any, num_rows: int, rows: Sequence[int], path: tuple[Any, ...]) -> Any:
        if isinstance(tree, Tensor) and (tree.layout != torch.strided or tree.is_nested) and self._exact:
            kind = "nested" if tree.is_nested else str(tree.layout).removeprefix("torch.")
            raise UsageError(f"a {kind} tensor in the labels cannot be cut by rows; use dense ones, or microbatches=1")
        if isinstance(tree, (Tensor, np.ndarray)):
            if not self._exact and not _has_length(tree, num_rows):
                return tree
            if isinstance(rows, range):
                return tree[rows.start : rows.stop]
            if isinstance(tree, np.ndarray):
                return tree[list(rows)]
            return torch.cat([tree[row : row + 1] for row in rows]) if rows else tree[:0]
        if isinstance(tree, _SETTINGS):
            return tree
        entries = self._entries(tree)
        if entries is None and not self._exact:
            return tree
        if entries is None:
            raise UsageError(
                f"a {type(tree).__name__} in the labels cannot be cut into rows; "
                "use tensors or a list with an entry for each row, or microbatches=1"
            )
        if self._by_entries(tree, num_rows, path):
            return _rebuilt(tree, [tree[row] for row in rows])
        return _rebuilt(tree, [self._take(value, num_rows, rows, (*path, key)) for key, value in entries])

    @staticmethod
    def _entries(tree: Any) -> list[tuple[Any, Any]] | None:
        return None if isinstance(tree, PackedSequence) else trees.children(tree)

    def _by_entries(self, tree: Any, num_rows: int, path: tuple[Any, ...]) -> bool:
        """Return whether a container has one entry for each row; raises `UsageError` if it has no rows at all."""
        if not isinstance(tree, (list, tuple)) or hasattr(tree, "_fields"):
            return False
        inside, entries = _has_rows(tree, num_rows), len(tree) == num_rows
        if inside and entries:
            return not self._inside.get(path, any(isinstance(x, (Tensor, np.ndarray)) for x in tree))
        if not inside and not entries:
            arrays = [x for x in trees.leaves(tree) if isinstance(x, (Tensor, np.ndarray))]
            if arrays and self._exact:
                raise UsageError(
                    f"the labels have a {type(tree).__name__} of {len(tree)} entries with tensors of "
                    f"{sorted({len(x) if x.ndim else 0 for x in arrays})} rows but the inputs have {num_rows} rows; "
                    "give one entry, or tensors with one row, for each row of the inputs"
                )
            return False
        self._inside[path] = inside
        return entries


def _is_nested(tree: Tensor | np.ndarray[Any, Any]) -> bool:
    return isinstance(tree, Tensor) and tree.is_nested


def _has_length(tree: Tensor | np.ndarray[Any, Any], num_rows: int) -> bool:
    return bool(tree.ndim) and len(tree) == num_rows


def _has_rows(tree: Any, num_rows: int) -> bool:
    """Return whether a container can be cut inside: all its values have rows, or are shared by all rows."""
    found = False
    for _, value in trees.children(tree) or []:
        if isinstance(value, (Tensor, np.ndarray)):
            if _is_nested(value) or not _has_length(value, num_rows):
                return False
            found = True
        elif isinstance(value, _SETTINGS):
            continue
        elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and len(value) == num_rows:
            found = True
        elif trees.children(value) is None or not _has_rows(value, num_rows):
            return False
        else:
            found = True
    return found


def _rebuilt(tree: Any, values: list[Any]) -> Any:
    try:
        return trees.rebuilt(tree, values)
    # catch any error of a user's container when it is copied or filled
    except Exception as error:
        raise UsageError(
            f"a {type(tree).__name__} cannot be rebuilt with other values ({error}); use a dict, a list or a tuple"
        ) from error


# advice for a model whose rows interact
WHOLE = "create the pipeline with microbatches=1 and one replica"


def bind(graph: Graph, inputs: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Check inputs against the capture and return them by name, with their sizes; raises `UsageError`."""
    tensors, sizes = bind_inputs(graph, *as_call(inputs))
    check_fixed(graph, sizes[BATCH])
    return {v.name: t for v, t in zip(graph.tensor_inputs(), tensors, strict=True)}, sizes


def cut_rows(
    graph: Graph, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], labels: Any, num_parts: int, cut: RowCut
) -> list[MicrobatchRows]:
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
        MicrobatchRows(
            {**sizes, "batch": len(rows)},
            {name: take_rows(x, dims.get(name), rows) for name, x in tensors.items()},
            labels_here,
        )
        for rows, labels_here in zip(parts, cut.parts(labels, sizes["batch"], parts), strict=True)
    ]


def largest(microbatches: Sequence[MicrobatchRows]) -> dict[str, int]:
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
