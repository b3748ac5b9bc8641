"""Operators that an engine has for what a captured graph computes in several operations.

They stand in a stage's operations only while a runtime prepares them for its engine, and have no kernel: only shapes.
"""

from typing import Any

import torch
from torch import Tensor

# writes `key` and `value` [B, S, G, D] to the caches at `positions` of `rows`, and attends with `query` [B, H, S, D]
ATTENTION = "penstock.cached_attention.default"
# x * cos + cat([-x[..., D/2:], x[..., :D/2]], -1) * sin, for `x` [B, H, S, D]
ROTARY = "penstock.rotary.default"

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
# no write is declared: no other operation uses these caches, so the order does not matter
_LIBRARY.define(
    "cached_attention(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor values, Tensor rows, "
    "Tensor positions, Tensor mask, float scale) -> Tensor"
)
_LIBRARY.define("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor")


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


for _name in ("cached_attention", "rotary"):
    _LIBRARY.impl(_name, _like_first, "Meta")
