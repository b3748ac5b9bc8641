"""Conversion between the user's calls and the flat tensors that stages exchange."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock import trees
from penstock.errors import UsageError
from penstock.graph.cuts import output_values
from penstock.graph.graph import Graph
from penstock.graph.ops import Ref
from penstock.values import Size, Value, write_expression


def bind_inputs(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, int]]:
    """Flatten a call's arguments to the graph's tensor inputs, and read the sizes.

    Raises `UsageError` if the arguments do not have the structure, shapes or dtypes of the capture.
    """
    # keywords in the order of the capture, since a dict's order is part of its structure
    ordered = {name: kwargs[name] for name in graph.input_spec.child(1).context or [] if name in kwargs}
    # treat other mappings, such as a tokenizer's output, as a dict, which the capture had
    call = trees.plain((tuple(args), ordered | dict(kwargs)), pytree.SUPPORTED_NODES.__contains__)
    leaves, spec = pytree.tree_flatten(call)
    if spec != graph.input_spec:
        raise UsageError(
            f"{graph.model} was captured with {_describe(graph.input_spec)} but called with {_describe(spec)}; "
            "call it as in the example"
        )
    tensors = [leaf for leaf, value in zip(leaves, graph.inputs, strict=True) if value is not None]
    for position, plain in graph.plain_inputs.items():
        given = leaves[position]
        if isinstance(given, Tensor) or type(given) is not type(plain.value) or given != plain.value:
            raise UsageError(
                f"{graph.model} was captured with {plain.name}={plain.value!r} but called with {_given(given)}; "
                "capture it again with the value that you want"
            )
    try:
        return tensors, read_sizes(graph.symbols, graph.tensor_inputs(), tensors)
    except UsageError as error:
        if graph.fixed_batch is None:
            raise
        raise UsageError(
            f"{error}; {graph.model} fixes its batch size at {graph.fixed_batch}: {graph.why_fixed}"
        ) from None


def read_sizes(symbols: Sequence[str], values: Sequence[Value], tensors: Sequence[Tensor]) -> dict[str, int]:
    """Derive every symbol's value from the tensors' shapes, and check all shapes and dtypes."""
    sizes: dict[str, int] = {}
    if len(values) != len(tensors):
        raise UsageError(f"expected {len(values)} input tensors, got {len(tensors)}")
    for value, tensor in zip(values, tensors, strict=True):
        if not isinstance(tensor, Tensor) or tensor.dtype != value.dtype or tensor.dim() != len(value.shape):
            raise UsageError(f"the input {value.name!r} must be {_shape(value)}; got {_given(tensor)}")
        for dimension, length in zip(value.shape, tensor.shape, strict=True):
            if isinstance(dimension, Size) and isinstance(dimension.expression, str):
                sizes.setdefault(dimension.expression, int(length))
    # in a later stage a symbol may occur only inside an expression such as 197*batch
    for symbol in symbols:
        if symbol not in sizes:
            sizes[symbol] = _solve(symbol, values, tensors, sizes)
    for value, tensor in zip(values, tensors, strict=True):
        wanted, given = value.evaluate(sizes), tuple(tensor.shape)
        if wanted != given:
            other = next(place for place, pair in enumerate(zip(wanted, given, strict=True)) if pair[0] != pair[1])
            advice = ""
            if other and isinstance(value.shape[other], int) and not value.dtype.is_floating_point:  # token ids
                alike = _varying(values, tensors, wanted[other], given[other])
                advice = f'; if that varies, capture it with dynamic={{"length": {json.dumps(alike)}}}'
            raise UsageError(f"the input {value.name!r} must be {_shape(value)}; got {_given(tensor)}{advice}")
    return sizes


def _varying(values: Sequence[Value], tensors: Sequence[Tensor], was: int, now: int) -> dict[str, int]:
    """Return the dimension of each input whose size differs from the capture."""
    return {
        value.name: dim
        for value, tensor in zip(values, tensors, strict=True)
        for dim, (size, length) in enumerate(zip(value.shape, tensor.shape, strict=False))
        if dim and size == was and length == now
    }


def _solve(symbol: str, values: Sequence[Value], tensors: Sequence[Tensor], known: Mapping[str, int]) -> int:
    """Find the size that makes an expression fit, by trying: sizes are small."""
    for value, tensor in zip(values, tensors, strict=True):
        for dimension, length in zip(value.shape, tensor.shape, strict=True):
            if isinstance(dimension, Size):
                for guess in range(1, int(length) + 1):
                    if dimension.evaluate({**known, symbol: guess}) == length:
                        return guess
    return 1


def build_output(graph: Graph, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Any:
    """Rebuild the model's output structure from the last stage's tensors."""
    by_name = {value.name: tensor for value, tensor in zip(output_values(graph), tensors, strict=True)}
    leaves = [_leaf(output, by_name, sizes) for output in graph.outputs]
    return pytree.tree_unflatten(leaves, graph.output_spec)


def _leaf(output: Any, by_name: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Any:
    if isinstance(output, Ref):
        return by_name[output.name]
    if isinstance(output, Size):
        return output.evaluate(sizes)
    return output


def _shape(value: Value) -> str:
    names = [write_expression(d.expression) if isinstance(d, Size) else str(d) for d in value.shape]
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(names)}]"


def _given(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return repr(tensor)[:80]
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _describe(spec: Any) -> str:
    positional, keyword = spec.child(0), spec.child(1)
    names = ", ".join(keyword.context or [])
    return f"{positional.num_children} positional inputs" + (f" and {names}" if names else "")


@dataclass(frozen=True, slots=True)
class CallInputs:
    """A call with positional and keyword inputs."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def as_call(item: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Read inputs as a call: a tensor, a tuple of positional inputs, a mapping of keyword inputs, or a `CallInputs`."""
    if isinstance(item, CallInputs):
        return item.args, item.kwargs
    if isinstance(item, Mapping):
        return (), dict(item)
    if isinstance(item, (tuple, list)):
        return tuple(item), {}
    return (item,), {}
