"""ONNX equivalents of a stage program's operators: a function for each, from bound arguments to the result's name.

Sizes and shapes are known when a graph is written: views become reshapes to a constant shape, and results are cast to
the dtype that torch's promotion rules gave.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.runtime.onnx.onnx_nodes import ELEMENTS, Flat, Made, Nodes


@dataclass(frozen=True, slots=True)
class OnnxCall:
    """A call of an operator: the graph so far, the result, and the arguments by their names in the schema."""

    nodes: Nodes
    out: Made
    given: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return an argument."""
        return self.given[name]

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        return self.nodes.add(kind, inputs, **attributes)

    def cast(self, value: Made) -> str:
        """Return a tensor in the dtype of the call's result."""
        return _cast(self.nodes, value, self.out.dtype)

    def number(self, value: float) -> str:
        """Return a number in the dtype of the call's result."""
        return self.nodes.constant(torch.tensor(value, dtype=self.out.dtype))

    def either(self, value: Made | float) -> str:
        """Return a tensor or a number in the dtype of the call's result."""
        return self.cast(value) if isinstance(value, Made) else self.number(value)

    def scaled(self, name: str, factor: float) -> str:
        """Return a tensor times a number."""
        return name if factor == 1 else self.add("Mul", [name, self.number(factor)])


# returns the name of the result, or None if it has described the result otherwise
Write = Callable[[OnnxCall], str | None]
OPERATORS: dict[str, Write] = {}


def _operator(*targets: str) -> Callable[[Write], Write]:
    def register(write: Write) -> Write:
        OPERATORS.update(dict.fromkeys((f"aten.{target}" for target in targets), write))
        return write

    return register


def _cast(nodes: Nodes, given: Made, dtype: torch.dtype) -> str:
    return given.name if given.dtype == dtype else nodes.add("Cast", [given.name], to=ELEMENTS[dtype])


def _reshaped(nodes: Nodes, name: str, shape: Sequence[int]) -> str:
    return nodes.add("Reshape", [name, nodes.numbers(shape)], allowzero=1)


@_operator(
    "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int",
    "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default",
)  # fmt: skip
def _view(call: OnnxCall) -> str | None:
    shape = call.out.shape
    source: Made = call["self"]
    if len(shape) == 4 and 0 not in shape and (len(source.shape) == 3 or source.flat is not None):
        if source.flat is not None and source.shape == shape:
            call.out.flat = source.flat
            return None
        if len(source.shape) == 3 and source.shape[:2] == shape[:2]:
            call.out.flat = Flat(source.name, turned=False)
            return None
    if source.flat is not None and not source.flat.turned and len(shape) == 3 and source.shape[:2] == shape[:2]:
        return source.flat.name
    if call.out.varies.count(True) == 1 and 0 not in shape:
        shape = tuple(-1 if varies else size for size, varies in zip(shape, call.out.varies, strict=True))
    return _reshaped(call.nodes, source.name, shape)


@_operator(
    "contiguous.default", "clone.default", "detach.default", "detach_.default", "alias.default", "dropout.default",
    "lift_fresh_copy.default", "to.device", "to.dtype", "to.dtype_layout", "_to_copy.default", "type_as.default",
)  # fmt: skip
def _same(call: OnnxCall) -> str:
    return call.cast(call["self"] if "self" in call.given else call["input"])


@_operator("expand.default", "expand_as.default")
def _expand(call: OnnxCall) -> str:
    source, shape = call["self"], list(call.out.shape)
    for axis in range(-len(source.shape), 0):
        if call.out.varies and call.out.varies[axis] and source.shape[axis] == shape[axis]:
            shape[axis] = 1  # the source's size, whatever it is
    return call.add("Expand", [source.name, call.nodes.numbers(shape)])


@_operator("permute.default")
def _permute(call: OnnxCall) -> str:
    rank = len(call.out.shape)
    return call.add("Transpose", [call["self"].name], perm=[axis % rank for axis in call["dims"]])


@_operator("transpose.int", "t.default", "mT.default")
def _transpose(call: OnnxCall) -> str | None:
    order = list(range(len(call.out.shape)))
    if order:
        first, second = call.given.get("dim0", len(order) - 2), call.given.get("dim1", len(order) - 1)
        order[first], order[second] = order[second], order[first]
    if (flat := call["self"].flat) is not None and order == [0, 2, 1, 3]:
        call.out.flat = replace(flat, turned=not flat.turned)
        return None
    return call.add("Transpose", [call["self"].name], perm=order)


@_operator("cat.default")
def _concatenate(call: OnnxCall) -> str:
    # torch ignores one-dimensional tensors without elements, for any shape of the others
    parts = [part for part in call["tensors"] if part.shape != (0,)] or call["tensors"][:1]
    return call.add("Concat", [call.cast(part) for part in parts], axis=call["dim"] % len(call.out.shape))


@_operator("stack.default")
def _stack(call: OnnxCall) -> str:
    axis = call["dim"] % len(call.out.shape)
    shape = [1 if index == axis else size for index, size in enumerate(call.out.shape)]
    parts = [_reshaped(call.nodes, call.cast(part), shape) for part in call["tensors"]]
    return call.add("Concat", parts, axis=axis)


@_operator("select.int")
def _select(call: OnnxCall) -> str:
    axis = call["dim"] % len(call["self"].shape)
    index = call["index"] % call["self"].shape[axis]
    return call.add("Gather", [call["self"].name, call.nodes.scalar(index)], axis=axis)


@_operator("slice.Tensor")
def _slice(call: OnnxCall) -> str:
    axis = call["dim"] % len(call.out.shape)
    size = call["self"].shape[axis]
    begin, end, step = (call[name] for name in ("start", "end", "step"))
    begin, end = (0 if begin is None else begin), (size if end is None else end)
    begin, end = (min(max(place + size if place < 0 else place, 0), size) for place in (begin, end))
    return slice_axis(call.nodes, call["self"], axis, begin, end, step)


def slice_axis(nodes: Nodes, given: Made, axis: int, begin: int, end: int, step: int = 1) -> str:
    """Slice one axis."""
    if (begin, step) == (0, 1) and end >= given.shape[axis]:
        return given.name
    return nodes.add("Slice", [given.name, *(nodes.numbers([number]) for number in (begin, end, axis, step))])


@_operator("linear.default")
def _linear(call: OnnxCall) -> str:
    weight, bias = call["weight"], call["bias"]
    product = call.nodes.packed_product(call["input"])
    if product is None:
        if weight.value is not None:
            turned = call.nodes.constant(weight.value.t())
        else:
            turned = call.add("Transpose", [weight.name], perm=[1, 0])
        product = call.add("MatMul", [call["input"].name, turned])
    return product if bias is None else call.add("Add", [product, bias.name])


@_operator("addmm.default")
def _addmm(call: OnnxCall) -> str:
    product = call.nodes.packed_product(call["mat1"])
    if product is None:
        product = call.add("MatMul", [call["mat1"].name, call["mat2"].name])
    return call.add("Add", [call.scaled(product, call["alpha"]), call.scaled(call["self"].name, call["beta"])])


@_operator("mm.default", "bmm.default")
def _product(call: OnnxCall) -> str:
    return call.add("MatMul", [call["self"].name, call["mat2"].name])


@_operator("matmul.default")
def _matmul(call: OnnxCall) -> str:
    return call.add("MatMul", [call["self"].name, call["other"].name])


@_operator("embedding.default")
def _embedding(call: OnnxCall) -> str:
    return call.add("Gather", [call["weight"].name, call["indices"].name], axis=0)


@_operator("layer_norm.default")
def _layer_norm(call: OnnxCall) -> str:
    shape = call["normalized_shape"]
    weight = call["weight"]
    scale = weight.name if weight is not None else call.nodes.constant(torch.ones(shape, dtype=call.out.dtype))
    bias = [call["bias"].name] if call["bias"] is not None else []
    return call.add(
        "LayerNormalization", [call["input"].name, scale, *bias], axis=-len(shape), epsilon=float(call["eps"])
    )


@_operator("batch_norm.default")
def _batch_norm(call: OnnxCall) -> str:
    mean, variance = call["running_mean"], call["running_var"]
    weight, bias = call["weight"], call["bias"]
    ones = torch.ones(mean.shape, dtype=mean.dtype)
    scale = weight.name if weight is not None else call.nodes.constant(ones)
    shift = bias.name if bias is not None else call.nodes.constant(torch.zeros_like(ones))
    return call.add(
        "BatchNormalization", [call["input"].name, scale, shift, mean.name, variance.name], epsilon=float(call["eps"])
    )


@_operator("scaled_dot_product_attention.default")
def _attention(call: OnnxCall) -> str:
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(query.shape[-1])
    rank, shape = len(key.shape), (query.shape[-2], key.shape[-2])
    turned = call.add("Transpose", [key.name], perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = call.add("MatMul", [call.scaled(query.name, scale), turned])
    if call["is_causal"]:
        future = torch.full(shape, -math.inf, dtype=call.out.dtype).triu(1)
        scores = call.add("Add", [scores, call.nodes.constant(future)])
    if mask is not None:
        if mask.dtype == torch.bool:
            zero, never = (call.number(number) for number in (0.0, -math.inf))
            scores = call.add("Add", [scores, call.add("Where", [mask.name, zero, never])])
        else:
            scores = call.add("Add", [scores, call.cast(mask)])
    weights = call.add("Softmax", [scores], axis=-1)
    if mask is not None:  # a query without any visible key gets 0, as in torch
        weights = call.add("Where", [call.add("IsNaN", [weights]), call.number(0.0), weights])
    return call.add("MatMul", [weights, value.name])


@_operator("softmax.int", "_softmax.default")
def _softmax(call: OnnxCall) -> str:
    return call.add("Softmax", [call.cast(call["self"])], axis=call["dim"])


@_operator("gelu.default", "gelu_.default")
def _gelu(call: OnnxCall) -> str:
    return call.add("Gelu", [call["self"].name], approximate=call["approximate"])


@_operator("silu.default", "silu_.default")
def _silu(call: OnnxCall) -> str:
    return call.add("Mul", [call["self"].name, call.add("Sigmoid", [call["self"].name])])


@_operator("relu6.default")
def _relu6(call: OnnxCall) -> str:
    return call.add("Clip", [call["self"].name, call.number(0.0), call.number(6.0)])


@_operator("hardtanh.default", "hardtanh_.default")
def _hardtanh(call: OnnxCall) -> str:
    ends = [call.number(call[name]) for name in ("min_val", "max_val")]
    return call.add("Clip", [call["self"].name, *ends])


@_operator("conv2d.default")
def _convolution(call: OnnxCall) -> str:
    bias = [call["bias"].name] if call["bias"] is not None else []
    return call.add(
        "Conv",
        [call["input"].name, call["weight"].name, *bias],
        strides=_pair(call["stride"]),
        pads=_pair(call["padding"]) * 2,
        dilations=_pair(call["dilation"]),
        group=call["groups"],
    )


@_operator("max_pool2d.default")
def _max_pool(call: OnnxCall) -> str:
    kernel = _pair(call["kernel_size"])
    return call.add(
        "MaxPool",
        [call["self"].name],
        kernel_shape=kernel,
        strides=_pair(call["stride"]) if call["stride"] else kernel,
        pads=_pair(call["padding"]) * 2,
        dilations=_pair(call["dilation"]),
        ceil_mode=int(call["ceil_mode"]),
    )


def _pair(given: int | Sequence[int]) -> list[int]:
    pair = [given] if isinstance(given, int) else list(given)
    return pair * 2 if len(pair) == 1 else pair


def _reduction(kind: str) -> Write:
    def write(call: OnnxCall) -> str:
        axes = call.given.get("dim")
        axes = [] if axes is None else [axes] if isinstance(axes, int) else list(axes)
        return call.add(
            kind,
            [call.cast(call["self"]), *([call.nodes.numbers(axes)] if axes else [])],
            keepdims=int(call.given.get("keepdim", False)),
        )

    return write


def _arithmetic(kind: str) -> Write:
    def write(call: OnnxCall) -> str:
        second = call.either(call["other"])
        return call.add(kind, [call.either(call["self"]), call.scaled(second, call.given.get("alpha", 1))])

    return write


def _single(kind: str) -> Write:
    def write(call: OnnxCall) -> str:
        return call.add(kind, [call.cast(call["self"])])

    return write


def _comparison(kind: str) -> Write:
    def write(call: OnnxCall) -> str:
        first, second = call["self"], call["other"]
        dtype = torch.promote_types(first.dtype, second.dtype) if isinstance(second, Made) else first.dtype
        other = _cast(call.nodes, second, dtype) if isinstance(second, Made) else None
        number = call.nodes.constant(torch.tensor(second, dtype=dtype)) if other is None else other
        return call.add(kind, [_cast(call.nodes, first, dtype), number])

    return write


@_operator("pow.Tensor_Scalar")
def _power(call: OnnxCall) -> str:
    return call.add("Pow", [call.cast(call["self"]), call.number(call["exponent"])])


@_operator("rsqrt.default")
def _rsqrt(call: OnnxCall) -> None:
    call.out.inverse_of = call.add("Sqrt", [call["self"].name])


@_operator("mul.Tensor", "mul_.Tensor", "mul.Scalar")
def _times(call: OnnxCall) -> str:
    for first, second in (("self", "other"), ("other", "self")):
        factor = call[second]
        if isinstance(factor, Made) and factor.inverse_of is not None and factor.dtype == call.out.dtype:
            return call.add("Div", [call.either(call[first]), factor.inverse_of])
    return call.add("Mul", [call.either(call["self"]), call.either(call["other"])])


@_operator("where.self")
def _where(call: OnnxCall) -> str:
    sides = [call.cast(call[name]) for name in ("self", "other")]
    return call.add("Where", [call["condition"].name, *sides])


@_operator("masked_fill.Scalar")
def _masked_fill(call: OnnxCall) -> str:
    return call.add("Where", [call["mask"].name, call.number(call["value"]), call["self"].name])


@_operator("adaptive_avg_pool2d.default")
def _global_mean(call: OnnxCall) -> str:
    return call.add("GlobalAveragePool", [call["self"].name])


for _name, _kind in {
    "mean.dim": "ReduceMean",
    "mean.default": "ReduceMean",
    "sum.dim_IntList": "ReduceSum",
    "sum.default": "ReduceSum",
    "amax.default": "ReduceMax",
}.items():
    OPERATORS[f"aten.{_name}"] = _reduction(_kind)
for _name, _kind in {"add": "Add", "sub": "Sub", "div": "Div"}.items():
    OPERATORS |= {f"aten.{_name}{form}": _arithmetic(_kind) for form in (".Tensor", "_.Tensor", ".Scalar")}
for _name, _kind in {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "exp": "Exp", "sqrt": "Sqrt", "erf": "Erf",
                     "neg": "Neg", "abs": "Abs", "cos": "Cos", "sin": "Sin",
                     "hardswish": "HardSwish"}.items():  # fmt: skip
    OPERATORS |= {f"aten.{_name}{form}.default": _single(_kind) for form in ("", "_")}
for _name, _kind in {"eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual"}.items():
    OPERATORS |= {f"aten.{_name}{form}": _comparison(_kind) for form in (".Tensor", ".Scalar")}
