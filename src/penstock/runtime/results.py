"""Bounds on the bytes of an operation's result before it is computed, since a program may be untrusted.

The operations of usual models have a rule below: an upper bound from their arguments' shapes. All others are run on the
meta device, which allocates nothing but costs a second and 160 MB once, since torch imports sympy for it. Only the
first run at a microbatch size is checked: later runs have the same shapes, as no listed operator derives a size from
values beyond its rule, or changes a tensor's shape in place.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import OutOfMemory, ProgramError
from penstock.graph.operators import is_allowed_here
from penstock.graph.ops import resolve_operator
from penstock.memory import allowed_bytes
from penstock.units import format_bytes

# results up to this size are not compared with the available memory
_SMALL_BYTES = 4 * 2**20
_VIEW_BYTES = 1024  # a tensor without its elements
_Shape = Sequence[int]


def check_result(name: str, target: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Reject an operation whose result exceeds the memory that this process may still allocate.

    Raises `OutOfMemory` in that case, and `ProgramError` if the result's size cannot be determined beforehand.
    """
    if is_allowed_here(target):
        return
    packet = target.split(".")[1]
    rule = _RULES.get(packet) or _RULES.get(packet.removesuffix("_"))
    given = _in_order(target, arguments, keywords)
    num_bytes = _on_meta(name, target, arguments, keywords) if rule is None else rule(*given) * _item_bytes(given)
    if num_bytes > _SMALL_BYTES and num_bytes > (allowed := allowed_bytes()):
        raise OutOfMemory(
            f"operation {name} ({target}) would allocate up to {format_bytes(num_bytes)}, this process may allocate "
            f"{format_bytes(allowed)} more; use smaller microbatches or more stages"
        )


def _in_order(target: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Return all arguments in the order of the operator's schema, including defaults."""
    parameters = resolve_operator(target)._schema.arguments
    given = dict(zip((parameter.name for parameter in parameters), arguments, strict=False)) | dict(keywords)
    return [given.get(parameter.name, parameter.default_value) for parameter in parameters]


def _on_meta(name: str, target: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """Run an operation on tensors without memory; return the bytes of its result."""

    def without_memory(item: Any) -> Any:
        if isinstance(item, Tensor):
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
        if isinstance(item, torch.device):
            return torch.device("meta")
        return [without_memory(inner) for inner in item] if isinstance(item, (list, tuple)) else item

    with torch.no_grad():
        try:
            made = resolve_operator(target)(
                *map(without_memory, arguments), **{key: without_memory(item) for key, item in keywords.items()}
            )
        except NotImplementedError:
            raise ProgramError(
                f"the size of the result of {name} ({target}) cannot be determined beforehand; if you trust the "
                f"program, start this process with PENSTOCK_ALLOW_OPERATORS={target}"
            ) from None
    tensors = [item for item in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(item, Tensor)]
    return sum(tensor.numel() * tensor.dtype.itemsize + _VIEW_BYTES for tensor in tensors)


def _item_bytes(given: Sequence[Any]) -> int:
    """Return the largest element size of a result of these arguments."""
    dtypes = [item for item in given if isinstance(item, torch.dtype)]
    dtypes += [tensor.dtype for item in given for tensor in (item if isinstance(item, (list, tuple)) else [item])
               if isinstance(tensor, Tensor)]  # fmt: skip
    # sums of integers of any type are int64
    sizes = [dtype.itemsize if dtype.is_floating_point or dtype.is_complex else 8 for dtype in dtypes]
    return max([4, *sizes])


def _count(sizes: Iterable[int]) -> int:
    return int(math.prod(sizes))


def _broadcast(*shapes: _Shape) -> list[int]:
    rank = max(map(len, shapes), default=0)
    padded = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True)]


def _elementwise(*arguments: Any) -> int:
    return _count(_broadcast(*(item.shape for item in arguments if isinstance(item, Tensor))))


def _own(x: Tensor, *_: Any) -> int:
    return x.numel()


def _positions(*arguments: Any) -> int:
    return 5 * _elementwise(*arguments)  # values, and int64 positions


def _view(*_: Any) -> int:
    return _VIEW_BYTES


def _unbind(x: Tensor, dim: int = 0) -> int:
    return _VIEW_BYTES * x.shape[dim]


def _split(x: Tensor, size: Any, dim: int = 0) -> int:
    return _VIEW_BYTES * (len(size) if isinstance(size, (list, tuple)) else x.shape[dim] // max(1, size) + 1)


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> int:
    return _VIEW_BYTES * min(chunks, x.shape[dim])


def _joined(tensors: Sequence[Tensor], *_: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _linear(x: Tensor, weight: Tensor, *_: Any) -> int:
    return _count(x.shape[:-1]) * (weight.shape[0] if weight.dim() > 1 else 1)


def _matmul(a: Tensor, b: Tensor, *_: Any) -> int:
    rows = a.shape[-2] if a.dim() > 1 else 1
    columns = b.shape[-1] if b.dim() > 1 else 1
    return _count(_broadcast(a.shape[:-2], b.shape[:-2])) * rows * columns


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    batch = _count(_broadcast(query.shape[:-2], key.shape[:-2], value.shape[:-2]))
    return batch * query.shape[-2] * value.shape[-1]


def _convolution(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> int:
    del bias, groups
    rank = weight.dim() - 2
    batch = x.shape[0] if x.dim() == weight.dim() else 1
    strides, dilations = _each(stride, rank), _each(dilation, rank)
    paddings = [0] * rank if isinstance(padding, str) else _each(padding, rank)
    places = 1
    for index in range(rank):
        size, kernel = x.shape[index - rank], weight.shape[index + 2]
        reach = 0 if padding == "same" else dilations[index] * (kernel - 1)
        places *= max(0, (size + 2 * paddings[index] - reach - 1) // max(1, strides[index]) + 1)
    return batch * weight.shape[0] * places


def _pool(x: Tensor, *_: Any) -> int:
    """Padding is at most half of the kernel, and the last window may extend beyond the input."""
    return 3 * _count(size + 2 for size in x.shape)  # with int64 positions


def _adaptive_pool(x: Tensor, output_size: Any, *_: Any) -> int:
    sizes = output_size if isinstance(output_size, (list, tuple)) else [output_size]
    return 3 * _count(x.shape[: x.dim() - len(sizes)]) * _count(sizes)


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> int:
    return indices.numel() * weight.shape[-1]


def _index(x: Tensor, indices: Sequence[Any], *_: Any) -> int:
    kept, position, picked = 1, 0, []
    for index in indices:
        if index is None:
            kept *= x.shape[position]
            position += 1
        elif index.dtype in {torch.bool, torch.uint8}:
            picked.append([index.numel()])  # at most all of them
            position += index.dim()
        else:
            picked.append(list(index.shape))
            position += 1
    return kept * _count(x.shape[position:]) * _count(_broadcast(*picked))


def _full(size: Any = (), *_: Any) -> int:
    return 2 * _count(size)  # int64 or float64, for any default dtype


def _arange(*arguments: Any) -> int:
    """Bound `arange(end)`, `arange(start, end)` and `arange(start, end, step)`."""
    numbers = [item for item in arguments[:3] if isinstance(item, (int, float)) and not isinstance(item, bool)]
    first, last, step = (0, numbers[0], 1) if len(numbers) == 1 else (*numbers[:2], *numbers[2:], 1)[:3]
    return 2 * (math.ceil(abs(last - first) / abs(step)) + 1 if step else 1)


def _new_full(_: Tensor, size: Any, *__: Any) -> int:
    return _count(size)


def _repeat(x: Tensor, repeats: Any, *_: Any) -> int:
    return x.numel() * (_count(repeats) if isinstance(repeats, (list, tuple)) else int(repeats))


def _pad(x: Tensor, pad: Sequence[int], *_: Any) -> int:
    sizes = list(x.shape)
    for index in range(len(pad) // 2):
        sizes[-1 - index] += max(0, pad[2 * index]) + max(0, pad[2 * index + 1])
    return _count(sizes)


def _upsample(x: Tensor, output_size: Any, *rest: Any) -> int:
    factors = [item for item in rest if isinstance(item, (list, tuple))]
    if output_size is not None:
        return _count(x.shape[:2]) * _count(output_size)
    if not factors:
        raise ProgramError("an upsampling needs a size or factors; the program file is damaged or forged")
    return _count(x.shape[:2]) * _count(
        math.ceil(size * factor) for size, factor in zip(x.shape[2:], factors[0], strict=False)
    )


def _one_hot(x: Tensor, num_classes: int = -1) -> int:
    if num_classes < 0:
        raise ProgramError(
            "one_hot without num_classes has a size that depends on values; give num_classes and split the model again"
        )
    return x.numel() * num_classes


def _recurrent(
    x: Tensor, states: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> int:  # fmt: skip
    """Check what modules like `torch.nn.LSTM` check: the operators do not, and would read beyond their tensors."""
    del dropout, train
    states = states if isinstance(states, list) else [states]
    places = num_layers * (2 if bidirectional else 1)
    each = len(params) // max(1, places)
    if x.dim() != 3 or places < 1 or each * places != len(params) or each - 2 * has_biases not in {2, 3}:
        raise ProgramError("a recurrent layer has an unexpected number of weights or dimensions; split the model again")
    rows, wide = params[0].shape[0], params[1].shape[-1]
    batch = x.shape[0 if batch_first else 1]
    wanted = [(places, batch, wide), (places, batch, rows // 4)][: len(states)]
    shapes: list[tuple[int, ...]] = []
    for place in range(places):
        layer = place // (2 if bidirectional else 1)
        shapes += [(rows, x.shape[-1] if not layer else wide * (places // num_layers)), (rows, wide)]
        shapes += [(rows,)] * 2 * has_biases + [(wide, rows // 4)] * (each - 2 - 2 * has_biases)
    given = [tuple(tensor.shape) for tensor in (*states, *params)]
    if given != wanted + shapes or len({tensor.dtype for tensor in (x, *states, *params)}) > 1:
        raise ProgramError("a recurrent layer's weights and states do not fit its input; split the model again")
    return int(_count([*x.shape[:2], wide, places]) + sum(state.numel() for state in states))


def _each(value: Any, rank: int) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * rank if len(values) == 1 else values


def _rules() -> dict[str, Callable[..., int]]:
    families: list[tuple[Callable[..., int], str]] = [
        (_view, "alias as_strided detach expand expand_as movedim moveaxis narrow numpy_T permute real select "
                "slice squeeze t transpose unflatten unsqueeze view"),
        (_unbind, "unbind"), (_split, "split split_with_sizes"), (_chunk, "chunk"),
        (_own, "batch_norm clone contiguous flatten group_norm instance_norm layer_norm prelu "
               "reshape reshape_as rms_norm to type_as"),
        (_elementwise, "__and__ __or__ __xor__ __iand__ __ior__ __ixor__ abs add addcdiv addcmul alpha_dropout amax "
                       "amin all any bernoulli bitwise_and bitwise_not bitwise_or "
                       "bitwise_xor ceil celu clamp clamp_max clamp_min copy cos cumsum div dropout "
                       "elu empty_like eq erf exp expm1 feature_dropout fill floor floor_divide full_like ge "
                       "gelu glu gt hardshrink hardsigmoid hardswish hardtanh isinf isnan "
                       "le leaky_relu lift_fresh_copy linalg_vector_norm log log1p log2 log_sigmoid "
                       "log_softmax logical_and logical_not logical_or logical_xor logsumexp lt masked_fill maximum "
                       "mean minimum mish mul multiply ne neg norm normal_ ones_like pixel_shuffle pixel_unshuffle "
                       "pow rand_like randn_like reciprocal relu relu6 remainder "
                       "roll round rsqrt rsub selu sigmoid sign silu sin softmax softplus softsign sqrt square std "
                       "sub sum tanh tril triu true_divide uniform var where zero zeros_like"),
        (_positions, "argmax argmin max min sort topk"),
        (_joined, "cat concat concatenate stack hstack vstack"),
        (_linear, "linear"), (_matmul, "matmul mm bmm mv dot"), (lambda _, a, b, *__: _matmul(a, b), "addmm baddbmm"),
        (_attention, "scaled_dot_product_attention"), (_convolution, "conv1d conv2d conv3d"),
        (_pool, "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices"),
        (_adaptive_pool, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
        (_embedding, "embedding"), (_index, "index"), (lambda _x, _dim, index, *_: index.numel(), "gather"),
        (_repeat, "repeat repeat_interleave"),
        (_recurrent, "lstm gru rnn_tanh rnn_relu"), (_arange, "arange"), (_full, "zeros ones full empty rand randn"),
        (_new_full, "new_zeros new_ones new_full new_empty"),
        (_pad, "pad constant_pad_nd"), (_one_hot, "one_hot"),
        (_upsample, "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d"),
    ]  # fmt: skip
    return {name: rule for rule, names in families for name in names.split()}


_RULES = _rules()
