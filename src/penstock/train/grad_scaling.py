"""`torch.amp.GradScaler` over several processes: all ranks use one scale, and all skip a step if one of them must.

A scaler looks only at the gradients of its own process, so that an infinity in one stage would make this stage alone
skip its step and halve its scale. While a run of several processes trains, the scaler's check is a collective call:

    rank 0   unscale_: finite      ─┐ together ─▶ skip, halve
    rank 1   unscale_: infinite    ─┘          ─▶ skip, halve
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from penstock.errors import UsageError, everywhere
from penstock.train.trainer import Trainer

_active: "weakref.WeakSet[Trainer]" = weakref.WeakSet()


def follow_scalers(trainer: Trainer) -> None:
    """Share the infinities that a `GradScaler` finds among all ranks of this run, until `forget_scalers`."""
    if trainer.world.transport.size == 1 and trainer.survivors is None:
        return
    if not hasattr(GradScaler._unscale_grads_, "__wrapped__"):
        for name, wrap in (("_unscale_grads_", _shared), ("_check_scale_growth_tracker", _begun)):
            setattr(GradScaler, name, wrap(getattr(GradScaler, name)))
    _active.add(trainer)


def forget_scalers(trainer: Trainer) -> None:
    """Leave scalers of this process to PyTorch again."""
    _active.discard(trainer)


def _shared(unscale: Any) -> Any:
    @functools.wraps(unscale)
    def call(
        self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: Tensor, *arguments: Any
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = unscale(self, optimizer, inv_scale, *arguments)
        if (trainer := _trainer_of(optimizer)) is None:
            return found
        here = {device: tensor for device, tensor in found.items() if device.type != "meta"} or {
            inv_scale.device: torch.zeros((), device=inv_scale.device)
        }
        infinite = _any_infinite(trainer, self, any(bool(tensor) for tensor in here.values()))
        return {device: torch.full_like(tensor, float(infinite)) for device, tensor in here.items()}

    return call


def _any_infinite(trainer: Trainer, scaler: GradScaler, infinite: bool) -> bool:
    if trainer.survivors is not None:
        raise UsageError(
            "on_loss cannot give a GradScaler's scale to a process that joins; use autocast=torch.bfloat16, which "
            "needs no scale, or leave on_loss out"
        )
    with trainer.call("GradScaler"):
        told = trainer.together(lambda: {"infinite": infinite, "scale": scaler.get_scale()})
    names, scales = trainer.world.names, [each["scale"] for each in told]
    if other := next((rank for rank, scale in enumerate(scales) if scale != scales[0]), None):
        with everywhere():
            raise UsageError(
                f"a GradScaler must have one scale on all ranks; got {scales[0]:g} on {names[0]} and {scales[other]:g} "
                f"on {names[other]}: create, load and update it on every rank"
            )
    return any(each["infinite"] for each in told)


def _begun(check: Any) -> Any:
    """Let a rank without the loss, whose scaler never scales anything, begin with the initial scale."""

    @functools.wraps(check)
    def call(self: GradScaler, name: str) -> Any:
        if self._scale is None and (
            waiting := [each for each in _active if each.now.last_stage not in each.now.stages]
        ):
            self.scale(torch.ones((), device=waiting[0].device))
        return check(self, name)

    return call


def _trainer_of(optimizer: torch.optim.Optimizer) -> Trainer | None:
    """Return the run that an optimizer belongs to.

    An optimizer that holds no parameter of a run in this process may still belong to it: its parameters are elsewhere.
    """
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    active = list(_active)
    for trainer in active:
        if optimizer in trainer.optimizers or not given.isdisjoint(map(id, trainer.now.tensors.parameters.values())):
            return trainer
    return active[0] if len(active) == 1 else None
