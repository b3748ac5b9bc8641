"""Attention masks of rows at different positions, made when the model asks transformers for a mask."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.graph.exporting import EXPORTING
from penstock.zoo.optional import optional_import

_FAR = 2**40  # beyond any window
# maps indices of batch, head, queries and keys to True if a query sees a key
MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]


@contextlib.contextmanager
def masks_by(make: Callable[[MaskFunction], Tensor]) -> Iterator[None]:
    """In this thread, replace the masks of transformers' models by those that `make` returns.

    The argument of `make` is the kind of mask as a function of indices: causal, with a sliding window, in chunks.
    """
    interfaces = optional_import("transformers.masking_utils", "text").ALL_MASK_ATTENTION_FUNCTIONS
    owner = threading.get_ident()

    def replaced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, mask_function: MaskFunction, **named: Any) -> Any:
            if threading.get_ident() != owner:
                return original(*args, mask_function=mask_function, **named)
            seen = make(mask_function)
            return as_added(seen, named.get("dtype", torch.float32)) if name == "eager" else seen

        return made

    with EXPORTING:
        originals = {name: interfaces[name] for name in interfaces}
        try:
            for name, original in originals.items():
                interfaces[name] = replaced(name, original)
            yield
        finally:
            for name, original in originals.items():
                interfaces[name] = original


def mask_of_rows(function: MaskFunction, positions: Tensor, places: Tensor) -> Tensor:
    """Return the mask [B, 1, S, T] of queries at `positions` [B, S] and keys at `places` [T]."""
    rows = torch.arange(positions.shape[0])[:, None, None, None]
    return function(rows, torch.zeros((), dtype=torch.int64), positions[:, None, :, None], places)


def is_causal(function: MaskFunction) -> bool:
    """Return whether a token does not attend to the token after it."""
    return not _sees(function, 0, 1)


def sees_everything(function: MaskFunction) -> bool:
    """Return whether a token attends to all tokens before it, however far."""
    return _sees(function, _FAR, 0)


def _sees(function: MaskFunction, query: int, key: int) -> bool:
    zero = torch.zeros(1, dtype=torch.int64)
    return bool(function(zero, zero, zero + query, zero + key).any())


def as_added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to one that is added to scores."""
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype)
    return torch.where(seen, torch.zeros((), dtype=dtype), hidden)
