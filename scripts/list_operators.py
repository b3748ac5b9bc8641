"""Make the list of operators that a stage program may call, `src/penstock/graph/operators.txt`.

    python -m benchmarks.coverage.operators --json operators.json      # 5 minutes: what capture emits
    python scripts/list_operators.py operators.json > src/penstock/graph/operators.txt

Written by hand are the groups below and what is left out; the rest comes from PyTorch and from the captures. An
overload is listed only if the dispatcher has it, and never one with an `out` argument, a generator, names of
dimensions, storages, streams or quantizers.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch

# Operators of public functions in torch, torch.nn.functional, torch.fft and torch.linalg that models of other
# architectures than the covered ones call. Their results' sizes follow from their arguments, not from values.
ORDINARY = """
absolute addbmm addcdiv addmv addr adjoint affine_grid_generator all allclose aminmax angle arccos arccosh arcsin
arcsinh arctan arctan2 arctanh argsort atleast_1d atleast_2d atleast_3d bartlett_window bitwise_left_shift
bitwise_right_shift blackman_window block_diag broadcast_to bucketize cartesian_prod cdist chain_matmul
cholesky_inverse cholesky_solve clamp_max clip column_stack combinations complex concat concatenate conj conj_physical
copysign corrcoef count_nonzero cov cross ctc_loss cummax cummin cumprod cumulative_trapezoid deg2rad det diag
diag_embed diagflat digamma dist divide dot dsplit dstack empty empty_like erfc erfinv exp2 fft_fft fft_fft2
fft_fftfreq fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2
fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill_diagonal fix fliplr flipud
float_power floor_divide fmax fmin frac frexp frobenius_norm gcd ger gradient greater greater_equal grid_sampler
grid_sampler_3d hamming_window hann_window heaviside hsplit hstack hypot i0 igamma igammac imag index_add index_copy
index_fill index_reduce inner inverse is_complex is_floating_point isclose isfinite isin isneginf isposinf isreal istft
kaiser_window kron kthvalue lcm ldexp lerp less less_equal lgamma linalg_cholesky linalg_cond linalg_cross linalg_det
linalg_diagonal linalg_eigh linalg_eigvalsh linalg_inv linalg_lstsq linalg_matmul linalg_matrix_exp linalg_matrix_norm
linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve
linalg_solve_triangular linalg_svd linalg_svdvals linalg_vander linalg_vecdot linspace logaddexp logaddexp2
logcumsumexp logdet logit logspace logsumexp mH mT matrix_H matrix_exp matrix_power max_unpool2d max_unpool3d median
mode moveaxis movedim msort multilabel_margin_loss mv nan_to_num nanmean nanmedian nanquantile nansum narrow
native_batch_norm native_channel_shuffle negative new_full new_zeros nll_loss nll_loss2d norm norm_except_dim not_equal
nuclear_norm one_hot ones ones_like outer pdist pinverse polar polygamma positive put quantile rad2deg rand_like randint
randint_like randn_like ravel relu6 renorm replication_pad1d resolve_conj resolve_neg rnn_relu rnn_relu_cell rot90
searchsorted sgn signbit sinc slogdet special_digamma special_entr special_erf special_erfc special_erfcx
special_erfinv special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0
special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_log_softmax special_logit special_logsumexp
special_ndtr special_ndtri special_polygamma special_psi special_round special_sinc
special_softmax special_xlog1py special_xlogy special_zeta square std std_mean stft subtract swapaxes swapdims take
take_along_dim tensor_split tensordot tile trace trapezoid trapz tril tril_indices triu triu_indices true_divide unfold
vander var_mean vdot view_as view_as_complex view_as_real vsplit vstack xlogy normal uniform exponential bernoulli
log_normal cauchy geometric
"""

# Names with a leading underscore are PyTorch's own and may do without checks. These have them, and no other name:
UNDERSCORED = {
    "_upsample_nearest_exact1d": "nn.Upsample(mode='nearest-exact')",
    "_upsample_nearest_exact2d": "nn.Upsample(mode='nearest-exact')",
    "_upsample_nearest_exact3d": "nn.Upsample(mode='nearest-exact')",
    "_weight_norm": "torch.nn.utils.weight_norm; a composite of norms and products",
    "__and__": "a & b of masks; the same as bitwise_and, as are the five below of their kind",
    "__or__": "a | b", "__xor__": "a ^ b", "__iand__": "a &= b", "__ior__": "a |= b", "__ixor__": "a ^= b",
}  # fmt: skip

# Core or emitted, and yet not listed.
LEFT_OUT = {
    "resize_": "changes a tensor's storage", "resize_as_": "changes a tensor's storage", "resize": "as before",
    "resize_as": "as before", "as_strided_": "changes a tensor that others hold",
    "empty_strided": "memory as it was left, and nothing else makes it full",
    "nonzero": "its size depends on values", "masked_select": "its size depends on values",
    "lstm.data": "packed sequences: lengths of rows are not checked", "gru.data": "as before",
    "rnn_tanh.data": "as before", "rnn_relu.data": "as before",
    "random_": "does not end for some bounds", "random": "as before",
    "where.default": "its size depends on values",
    "repeat_interleave.Tensor": "its size depends on values", "repeat_interleave.self_Tensor": "as before",
    "sym_size": "sizes are expressions of the program", "sym_numel": "as before", "sym_stride": "as before",
    "sym_storage_offset": "as before", "sym_is_contiguous": "as before",
    "to.prim_Device": "devices are the stage's", "to.prim_dtype": "not of the dispatcher's kind",
    "to.prim_other": "not of the dispatcher's kind",
}  # fmt: skip

_NOT_DATA = ("Generator", "Dimname", "Storage", "Stream", "QScheme", "__torch__", "str[]")


def main() -> None:
    """Print the list: a line for each packet, with its overloads."""
    emitted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["operators"]
    known = _dispatched()
    captured = {tuple(name.split(".")[1:]) for name in emitted if name.startswith("aten.")}
    core = {(p, o) for p, os in known.items() for o in os if torch.Tag.core in _overload(p, o).tags}
    ordinary = {(p, o) for name in ORDINARY.split() for p in (name, f"{name}_") for o in known.get(p, ())}
    near = {
        (p, o)
        for name in {p for p, _ in captured | core}
        for p in (name, f"{name}_", name.rstrip("_"))
        for o in known.get(p, ())
    }
    print("# The operators that a stage program may call: a packet, then its overloads.\n#")
    print("# Made by scripts/list_operators.py, which says what is chosen by hand and why; change it there.")
    print(f"# Core and dispatched are those of torch {torch.__version__.partition('+')[0]}.")
    seen: set[tuple[str, str]] = set()
    for title, group in (
        ("core ATen operators (torch.Tag.core) of a forward pass", core),
        ("what capture emits over the covered architectures and torch.nn, in evaluation and in training", captured),
        ("other overloads of these, and their in-place and out-of-place twins", near),
        ("what public functions of torch emit beside them, chosen by hand", ordinary),
        ("leading underscores, by name", {(p, o) for p in UNDERSCORED for o in known.get(p, ())}),
    ):
        rows: defaultdict[str, list[str]] = defaultdict(list)
        for packet, overload in sorted(group - seen):
            if _is_listed(packet, overload, known):
                rows[packet].append(overload)
                seen.add((packet, overload))
        print(f"\n# {title}")
        for packet, overloads in rows.items():
            print(" ".join([f"aten.{packet}", *overloads]))


def _is_listed(packet: str, overload: str, known: dict[str, set[str]]) -> bool:
    if {packet, f"{packet}.{overload}"} & LEFT_OUT.keys() or re.search("backward|unsafe", packet):
        return False
    if (
        packet != "detach_"
        and overload in known.get(packet, ())
        and torch.Tag.inplace_view in _overload(packet, overload).tags
    ):
        return False  # the shape of a tensor that a stage keeps would change from one microbatch to the next
    return overload in known.get(packet, ()) and (not packet.startswith("_") or packet in UNDERSCORED)


def _dispatched() -> dict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten":
            continue
        try:
            arguments = _overload(packet, overload or "default")._schema.arguments
        except AttributeError:  # the dispatcher's alone
            continue
        if not any(a.is_out or _is_no_data(a) for a in arguments):
            found[packet].add(overload or "default")
    return found


def _is_no_data(argument: torch.Argument) -> bool:
    """Tell whether an argument must be given and cannot be written in a program; None is written for a generator."""
    optional = "Optional" in str(argument.type) and argument.has_default_value()
    return not optional and any(kind in str(argument.type) for kind in _NOT_DATA)


def _overload(packet: str, overload: str) -> torch._ops.OpOverload:
    found: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return found


if __name__ == "__main__":
    main()
