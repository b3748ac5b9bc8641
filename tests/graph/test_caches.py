"""Caches that each stage allocates itself."""

import pytest
import torch
from torch import nn

from penstock.graph.decoders import add_cache, is_cache
from penstock.resources import anonymous_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_takes_no_memory_until_it_is_written(dtype: torch.dtype) -> None:
    module = nn.Module()
    before = anonymous_bytes()
    add_cache(module, "keys", 64, 2**20, dtype=dtype)
    after = anonymous_bytes()
    assert (after or 0) - (before or 0) < 2**22 < (after or 0)
    assert module.keys.shape == (64, 2**20)
    assert module.keys.dtype == dtype
    assert is_cache(module, "keys")
    assert not module.state_dict()
    keys = module.get_buffer("keys")
    keys[5, 7] = 3
    assert keys[5].sum() == 3


def test_a_cache_may_be_empty() -> None:
    module = nn.Module()
    add_cache(module, "keys", 0, 4)
    assert module.keys.shape == (0, 4)
