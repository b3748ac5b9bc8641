"""Split a model by itself and compare with the model, values crossing as messages do."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.deploy.split import SplitModel
from penstock.graph.call import bind_inputs, build_output
from penstock.graph.program import read_program, write_program
from penstock.transport.messages import DATA, Format, Message
from penstock.values import Value


def travels(split: SplitModel) -> None:
    """Write and read every stage's program, as a worker does; raises `ProgramError` where it would refuse one."""
    for stage in split.stages:
        read_program(write_program(stage.program))


def run(split: SplitModel, inputs: Mapping[str, Tensor]) -> Any:
    """Run the stages one after the other; between two of them the tensors go through a message's bytes."""
    symbols = split.graph.symbols
    tensors, sizes = bind_inputs(split.graph, (), inputs)
    tensors = _through_bytes(split.stages[0].program.inputs, symbols, tensors, sizes)
    with torch.inference_mode():
        for stage in split.stages:
            outputs = stage.runtime(sizes, tensors)
            tensors = _through_bytes(stage.program.outputs, symbols, outputs, sizes)
    return build_output(split.graph, tensors, sizes)


def _through_bytes(
    values: tuple[Value, ...], symbols: tuple[str, ...], tensors: list[Tensor], sizes: Mapping[str, int]
) -> list[Tensor]:
    """Write the tensors as a message into a fresh buffer and read them back."""
    layout = Format(values, symbols, sizes)
    buffer = torch.zeros(layout.largest(sizes), dtype=torch.uint8)
    layout.write(Message(DATA, 0, tuple(sizes[symbol] for symbol in symbols), tensors), buffer)
    return layout.read(buffer).tensors


def same(expected: object, given: object) -> bool:
    """Tell whether two results have the same structure and the same bits."""
    first, second = pytree.tree_flatten(expected), pytree.tree_flatten(given)
    if first[1] != second[1]:
        return False
    return all(_same_leaf(a, b) for a, b in zip(first[0], second[0], strict=True))


def same_tensors(expected: object, given: object) -> bool:
    """Tell whether two results hold the same tensors in the same order, whatever holds them."""
    first, second = ([leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)] for x in (expected, given))
    return len(first) == len(second) and all(_same_leaf(a, b) for a, b in zip(first, second, strict=True))


def _same_leaf(expected: Any, given: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(given, Tensor):
        return type(expected) is type(given) and bool(expected == given)
    return expected.dtype == given.dtype and torch.equal(expected, given)


def reference(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Run the model itself."""
    with torch.inference_mode():
        return model(**inputs)


def one_line(error: Exception) -> str:
    """Say an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
