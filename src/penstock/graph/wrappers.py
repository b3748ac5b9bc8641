"""Wrappers around a model that a pipeline replaces: data parallelism, sharding, compilation."""

from torch import nn

from penstock.errors import UsageError

_BEFORE = "the model before it was wrapped"
# the way out of each wrapper, by class name, so that nothing is imported for them
_WAY_OUT = {
    "DistributedDataParallel": "{}.module", "DataParallel": "{}.module", "OptimizedModule": "{}._orig_mod",
    "DeepSpeedEngine": _BEFORE, "_FabricModule": "{}.module", "FullyShardedDataParallel": _BEFORE,
    "FSDPModule": _BEFORE,
}  # fmt: skip


def check_unwrapped(model: nn.Module) -> None:
    """Raise `UsageError` if a model, or a module in it, is wrapped; the message names the module inside."""
    for path, module in model.named_modules():
        at = f"model.{path}" if path else "model"
        for kind in (kind.__name__ for kind in type(module).__mro__):
            if kind in _WAY_OUT:
                raise UsageError(
                    f"{at} is wrapped in {kind}, which a pipeline replaces; use {_WAY_OUT[kind].format(at)}"
                )
        if module._compiled_call_impl is not None:
            raise UsageError(
                f"{at} was compiled by compile(), which a pipeline replaces; use a model that is not compiled"
            )
