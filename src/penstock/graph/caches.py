"""Caches of a model: buffers that a stage makes for itself, such as the keys and values of a decoder."""

import torch
from torch import nn

_MARK = "penstock_caches"


def add_cache(module: nn.Module, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    """Add a buffer to a module that each stage allocates itself, initially zero, and that is never sent.

    The module's `forward` reads it and writes into it in place. In this process it is never written, so the system
    allocates no memory for it.

    Example:
        add_cache(self, "keys", slots, length, heads, width)
    """
    module.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)
    setattr(module, _MARK, {*getattr(module, _MARK, ()), name})


def is_cache(model: nn.Module, source: str) -> bool:
    """Return True if a model's buffer of that name is a cache."""
    owner, _, name = source.rpartition(".")
    return name in getattr(model.get_submodule(owner), _MARK, ())
