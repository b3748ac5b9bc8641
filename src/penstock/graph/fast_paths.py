"""PyTorch's fast paths for attention, which models use in evaluation but captures do not."""

import torch
from torch import nn


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
