"""Optimizers without parameters, as of a head on a process that holds other stages; torch's need at least one."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_patching = threading.RLock()  # threads may play processes


def nothing() -> nn.Parameter:
    """Return a parameter without elements, which no step changes; with two dimensions, as Muon needs them."""
    return nn.Parameter(torch.zeros(0, 0))


@contextlib.contextmanager
def empty_allowed(allowed: bool) -> Iterator[None]:
    """Within the context, an optimizer of an empty list of parameters gets one without elements, if `allowed`."""
    if not allowed:
        yield
        return
    with _patching:
        begin = torch.optim.Optimizer.__init__

        def call(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
            begin(self, params if isinstance(params, torch.Tensor) else list(params) or [nothing()], defaults)

        torch.optim.Optimizer.__init__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.optim.Optimizer.__init__ = begin  # type: ignore[method-assign]


def drop_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Remove parameters that other processes hold, which are on the meta device here."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_meta:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter in group["params"] if not parameter.is_meta]
    if optimizer.param_groups and is_empty(optimizer):
        optimizer.param_groups[0]["params"][:] = [nothing()]


def is_empty(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has no elements to update."""
    return not any(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
