"""Rules that derive the labels of an operator's result from the labels of its arguments; see `row_labels`.

An operator without a rule here and without a PyTorch tag is assumed to combine all its operands.
"""

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.graph import row_operators as operators
from penstock.graph.callbacks import Callback
from penstock.graph.row_labels import (
    PLACE,
    ROWS,
    Labelled,
    OperatorCall,
    flat,
    fold,
    join,
    no_label,
    over,
    per_row,
    place_label,
    read_all,
    total,
    varies,
)
from penstock.values import Value

Rule = Callable[[OperatorCall], Any]


def apply_rule(reading: OperatorCall) -> Any:
    """Return the labels of a result, broadcastable to its shape, or a list of labels for several results."""
    rule = _RULES.get(reading.name)
    if reading.operator is torch.ops.aten.view.dtype:
        rule = _over_last(1)
    if rule is None and _moves(reading):
        rule = _move
    if rule is None and (torch.Tag.pointwise in reading.operator.tags or reading.name in _POINTWISE):
        rule = _pointwise
    if rule is None and reading.name.startswith(("special_", "arc")):
        rule = _pointwise
    if rule is None and re.search(r"(pool|upsample_\w*|unpool|exact)(\d)d", reading.name):
        rule = _pool
    return (rule or read_all)(reading)


def _none(_: OperatorCall) -> Tensor:
    return no_label()


def _pointwise(reading: OperatorCall) -> Tensor:
    return join(no_label(), *reading.tensors())


def _loss(reading: OperatorCall) -> Tensor:
    return _pointwise(reading) if reading.named.get("reduction") == 0 else read_all(reading)


def _self(reading: OperatorCall) -> Tensor:
    return reading.first()


def _moves(reading: OperatorCall) -> bool:
    """Return True if an operator only moves elements; then it is run on the labels themselves."""
    if torch.Tag.pointwise in reading.operator.tags:
        return False
    views = any(each.alias_info and not each.alias_info.is_write for each in reading.operator._schema.returns)
    return (views or reading.name in _MOVES) and reading.name != "as_strided"


def _move(reading: OperatorCall) -> Any:
    def settled(item: Any, cast: torch.dtype) -> Any:
        if isinstance(item, Labelled):
            return item.labels.to(cast)
        return [settled(each, cast) for each in item] if isinstance(item, list) else item

    def run(cast: torch.dtype) -> Any:
        named = {key: settled(item, cast) for key, item in reading.named.items()}
        if "value" in named:  # the value of constant padding
            named["value"] = None if reading.name == "pad" else 0
        return reading.operator(**named)

    if any(isinstance(item, Labelled) and key not in _MOVED for key, item in reading.named.items()):
        return read_all(reading)  # for example, positions that are computed
    try:
        return run(torch.uint8)
    except RuntimeError:
        return run(torch.float32).to(torch.uint8)  # some operators do not support integers


def _reshape(reading: OperatorCall) -> Any:
    """Reshape labels that are stored once along the last dimensions, without expanding them."""
    labels, shape = reading.first(), reading.shape
    if 0 not in labels.stride():
        return _move(reading)  # must be a view like the value itself, because it is written to
    # labels are stored once from this dimension on
    first = max(dim + 1 for dim, stride in enumerate((1, *labels.stride())) if stride) - 1
    made = {math.prod(shape[dim:]): dim for dim in reversed(range(len(shape) + 1))}
    while math.prod(labels.shape[first:]) not in made:
        first += 1
    dim = made[math.prod(labels.shape[first:])]
    kept = labels
    for place in range(first, labels.dim()):
        kept = kept.narrow(place, 0, 1)
    return kept.reshape(*shape[:dim], *[1] * (len(shape) - dim))


def _triangle(reading: OperatorCall) -> Any:
    """Return the labels of operators whose elements depend on their position in two dimensions except the batch."""
    dims = [reading.named.get(key, default) for key, default in (("dim1", -2), ("dim2", -1))]
    labels = reading.first()
    if any(varies(labels, dim) for dim in dims):
        return join(total(labels), place_label())
    return _move(reading) if "diagonal" in reading.name and "fill" not in reading.name else labels


def _over_named(reading: OperatorCall) -> Tensor:
    """Return the labels of operators that combine along `dim`, or over all dimensions without `dim`."""
    labels = join(no_label(), *reading.tensors())
    dims = reading.named.get("dim")
    dims = list(range(labels.dim())) if dims is None or dims == [] else dims if isinstance(dims, list) else [dims]
    return over(labels, dims, len(reading.shape))


def _over_last(number: int) -> Rule:
    def rule(reading: OperatorCall) -> Tensor:
        labels = join(no_label(), *reading.tensors())
        missing = labels.dim() - len(reading.shape)
        folded = fold(labels, range(-number, 0))
        return folded.squeeze(tuple(range(-missing, 0))) if 0 < missing <= number else folded

    return rule


def _pool(reading: OperatorCall) -> Tensor:
    found = re.search(r"(\d)d", reading.name)
    number = int(found[1]) if found else 0
    return fold(reading.first(), range(-number, 0))


def _normalized(reading: OperatorCall) -> Tensor:
    number = len(reading.named["normalized_shape"])
    return join(fold(reading.first(), range(-number, 0)), reading.others())


def _over_rest(start: int) -> Rule:
    """Return the rule of operators that combine all dimensions from `start` on."""
    return lambda reading: join(fold(reading.first(), range(start, reading.first().dim())), reading.others())


def _batch_norm(reading: OperatorCall) -> Tensor:
    labels = reading.first()
    uses_batch = reading.named.get("training") or reading.named.get("running_mean") is None
    if uses_batch and not reading.apart:
        labels = fold(labels, [dim for dim in range(labels.dim()) if dim != 1])
    return join(labels, reading.others())


def _per_row(*names: str) -> Rule:
    """Return the rule of operators that compute each entry of dimension 0 from the same entry of these operands."""

    def rule(reading: OperatorCall) -> Tensor:
        rows = [each.labels for name in names for each in flat(reading.named.get(name))]
        rest = [each.labels for name, item in reading.named.items() if name not in names for each in flat(item)]
        return join(total(*rest), *(per_row(labels, len(reading.shape)) for labels in rows))

    return rule


def _copy(reading: OperatorCall) -> Tensor:
    source: Labelled = reading.named["src"]
    return source.labels


def _fill(reading: OperatorCall) -> Tensor:
    value = reading.named["value"]
    return value.labels if isinstance(value, Labelled) else no_label()


def _searched(reading: OperatorCall) -> Tensor:
    sorted_sequence, *values = reading.tensors()
    return join(
        no_label(), fold(sorted_sequence, [-1]) if sorted_sequence.dim() > 1 else total(sorted_sequence), *values
    )


def _complex_pairs(reading: OperatorCall) -> Tensor:
    return fold(reading.first(), [-1]).squeeze(-1)


def _one_more(reading: OperatorCall) -> Tensor:
    return reading.first().unsqueeze(-1)


def _words(text: str) -> list[str]:
    return text.split()


_MOVED = {"self", "input", "tensors", "other", "src"}  # arguments whose elements are moved, or whose shape is used
_MOVES = set(
    _words(
        "cat concat concatenate stack hstack vstack dstack column_stack block_diag repeat tile repeat_interleave "
        "roll flip fliplr flipud rot90 constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle "
        "native_channel_shuffle im2col diag diag_embed diagflat atleast_1d atleast_2d atleast_3d "
        "broadcast_tensors meshgrid fft_fftshift lift_fresh_copy clone"
    )
)
_POINTWISE = set(
    _words(
        "__and __or __xor __iand __ior __ixor absolute alpha_dropout bernoulli bucketize clip complex detach "
        "divide dropout feature_alpha_dropout feature_dropout fix floor_divide greater greater_equal hardswish "
        "isclose isin isreal less less_equal log_sigmoid multiply native_dropout negative normal not_equal polar "
        "subtract uniform xlogy where cauchy exponential geometric log_normal abs copysign eq gcd ge gelu gt "
        "heaviside lcm le lt masked_fill mish ne relu6 rrelu rsub threshold true_divide"
    )
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_words("to type_as detach real imag"), _self),
    **dict.fromkeys(_words("max min"), lambda r: (_pointwise if "other" in r.named else _over_named)(r)),
    **dict.fromkeys(_words(
        "new_empty new_full new_ones new_zeros zero is_complex is_floating_point"
    ), _none),
    **dict.fromkeys(_words(
        "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"
    ), _self),
    **dict.fromkeys(_words("tril triu diagonal linalg_diagonal"), _triangle),
    **dict.fromkeys(_words(
        "sum mean amax amin all any prod std var std_mean var_mean median nanmedian nanmean nansum argmax argmin "
        "logsumexp norm linalg_vector_norm linalg_norm frobenius_norm nuclear_norm quantile nanquantile mode "
        "kthvalue count_nonzero aminmax cumsum cumprod cummax cummin logcumsumexp softmax log_softmax "
        "special_softmax special_log_softmax special_logsumexp sort argsort topk glu cross linalg_cross "
        "linalg_vecdot cosine_similarity trapezoid trapz diff fft_fft fft_ifft fft_rfft fft_irfft fft_hfft "
        "fft_ihfft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn fft_rfft2 "
        "fft_irfft2 fft_rfftn fft_irfftn"
    ), _over_named),
    **dict.fromkeys(_words(
        "linalg_cholesky linalg_det linalg_eigh linalg_eigvalsh linalg_inv linalg_matrix_exp linalg_matrix_power "
        "linalg_pinv linalg_qr linalg_slogdet linalg_svd linalg_svdvals inverse det logdet slogdet "
        "cholesky_inverse matrix_exp matrix_power pinverse linalg_cond linalg_matrix_rank linalg_solve_triangular"
    ), _over_last(2)),
    **dict.fromkeys(_words("layer_norm native_layer_norm rms_norm"), _normalized),
    **dict.fromkeys(_words("group_norm native_group_norm"), _over_rest(1)),
    **dict.fromkeys(_words("batch_norm native_batch_norm"), _batch_norm),
    **dict.fromkeys(_words(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"
    ), operators.convolution),
    **dict.fromkeys(_words("grid_sampler grid_sampler_2d grid_sampler_3d"), _per_row("input", "grid")),
    **dict.fromkeys(_words("gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell"), _per_row("input", "hx")),
    **dict.fromkeys(_words("gru lstm rnn_relu rnn_tanh"), operators.recurrent),
    **dict.fromkeys(_words("matmul linalg_matmul mm bmm mv dot vdot"), operators.product),
    **dict.fromkeys(_words("addmm baddbmm addmv"), operators.added_product),
    **dict.fromkeys(_words("outer ger"), operators.outer),
    **dict.fromkeys(_words("gather take_along_dim"), operators.gather),
    **dict.fromkeys(_words("scatter scatter_add scatter_reduce"), operators.scatter),
    **dict.fromkeys(_words("index_add index_copy index_fill index_reduce"), operators.into_dim),
    **dict.fromkeys(_words(
        "l1_loss mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits kl_div hinge_embedding_loss poisson_nll_loss"
    ), _loss),
    "instance_norm": _over_rest(2), "pairwise_distance": _over_last(1), "stft": _per_row("self"),
    "col2im": _per_row("self"), "affine_grid_generator": _per_row("theta"),
    "scaled_dot_product_attention": operators.attention, "linear": operators.linear, "inner": operators.inner,
    "tensordot": operators.tensordot, "einsum": operators.einsum, "index": operators.read_index,
    "index_select": operators.read_selected, "embedding": operators.embedding, "index_put": operators.put_index,
    "select_scatter": operators.into_place, "slice_scatter": operators.into_place, "copy": _copy, "fill": _fill,
    "cdist": operators.distances, "searchsorted": _searched, "view_as_complex": _complex_pairs,
    "view_as_real": _one_more, "one_hot": _one_more,
    "prelu": lambda r: join(r.first(), r.others()),
}  # fmt: skip


def label_callback(
    callback: Callback,
    values: Sequence[Value],
    labels: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    twice: Sequence[int],
) -> list[Tensor]:
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
