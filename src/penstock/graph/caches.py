"""Caches of a model: buffers that a stage allocates itself, such as the keys and values of a decoder."""

import math
import mmap

import torch
from torch import nn

_MARK = "penstock_caches"
# inputs of a decoder with these names are the slots [B] and positions [B, S] at which keys and values are written
ROWS, POSITIONS = "rows", "positions"


def add_cache(module: nn.Module, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    """Add a cache to a module: a buffer that each stage allocates itself, initially zero, and that is never sent.

    The module's `forward` reads it and writes into it in place. Until it is written, which in this process it never is,
    it takes no memory.

    Example:
        add_cache(self, "keys", slots, length, heads, width)
    """
    # torch.zeros writes every page; pages of an anonymous mapping are zero until they are written
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)
    module.register_buffer(name, buffer, persistent=False)
    setattr(module, _MARK, {*getattr(module, _MARK, ()), name})


def is_cache(model: nn.Module, source: str) -> bool:
    """Return True if a model's buffer of this name is a cache."""
    owner, _, name = source.rpartition(".")
    return name in getattr(model.get_submodule(owner), _MARK, ())
