"""Exports of captures: their lock, fixes for older versions of PyTorch, and fast paths that they leave out."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# held during captures, which turn mkldnn, cudnn and nnpack off, and while torch settings are read
EXPORTING = threading.RLock()


def fast_layers(model: nn.Module) -> list[str]:
    """Return the class names of modules that use PyTorch's fast path when no gradients are computed.

    The conditions are taken from `torch.nn.modules.transformer` and `activation`, as far as they depend only on
    modules.

    >>> fast_layers(nn.TransformerEncoderLayer(8, 2, batch_first=True).eval())
    ['TransformerEncoderLayer']
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return []
    found, inner = [], set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inner.add(module.self_attn)
            if _fits(module.self_attn) and module.activation_relu_or_gelu and module.norm1.eps == module.norm2.eps:
                found.append(type(module).__name__)
        elif isinstance(module, nn.MultiheadAttention) and module not in inner and _fits(module):
            found.append(type(module).__name__)
    return list(dict.fromkeys(found))


def _fits(attention: nn.MultiheadAttention) -> bool:
    plain = attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn
    return (
        not attention.training and attention.batch_first and attention.in_proj_bias is not None and plain
        and attention._qkv_same_embed_dim and attention.num_heads % 2 == 0
    )  # fmt: skip


@contextlib.contextmanager
def ordered_multiples() -> Iterator[None]:
    """Within the context, PyTorch 2.10 and 2.11 simplify min(12x, 24x) to 12x, as newer versions do.

    Otherwise torch.export guards on this where it compares strides, and refuses other lengths for a model whose heads
    share keys, such as Llama. Hold `EXPORTING`.
    """
    import sympy  # only captures need it
    from torch.utils._sympy import functions

    base: Any = functions.MinMaxBase
    if hasattr(base, "_collapse_known_multiplicative_terms"):
        yield
        return
    inherited = base._collapse_arguments.__func__

    def collapse(cls: Any, /, args: Any, **assumptions: Any) -> Any:
        found = inherited(cls, args, **assumptions)
        if len(found) == 2:
            (one, factor), (other, same) = (each.as_coeff_Mul() for each in found)
            if factor == same and factor.is_nonnegative and one != other:
                return frozenset([sympy.Mul((min if cls is functions.Min else max)(one, other), factor)])
        return found

    base._collapse_arguments = classmethod(collapse)
    try:
        yield
    finally:
        base._collapse_arguments = classmethod(inherited)
