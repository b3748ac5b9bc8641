"""The caller's module during training, which shares its parameters with this process's stages."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError

_ELSEWHERE = "_penstock_parameters_elsewhere"


class SharedModule:
    """A module whose parameters and buffers are the same objects as the tensors of this process's stages.

    So a loss that penalizes `model.parameters()`, an optimizer of these parameters, their hooks and the module itself
    use the trained values. Parameters that only other processes hold move to the meta device, where using them fails.

    Example:
        shared = SharedModule(model)
        weight = shared.parameter("fc.weight", trained)     # model.fc.weight, with the values of `trained`
        shared.keep(["fc.weight"])                          # move all others to the meta device
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        first: dict[int, str] = {}
        self._owners: dict[str, list[tuple[nn.Module, str]]] = {}
        for path, owner in module.named_modules(remove_duplicate=False):
            for leaf, parameter in owner._parameters.items():
                if parameter is not None:
                    name = first.setdefault(id(parameter), f"{path}.{leaf}" if path else leaf)
                    self._owners.setdefault(name, []).append((owner, leaf))
        self._elsewhere: set[str] = set()

    def parameter(self, name: str, tensor: Tensor) -> nn.Parameter:
        """Return the module's parameter of this name, backed by the memory of `tensor`."""
        own = self._now(name)
        if own.device.type == "meta" or own.dtype != tensor.dtype:
            return self._put(name, nn.Parameter(tensor, own.requires_grad))
        own.data = tensor
        return own

    def buffer(self, name: str, tensor: Tensor) -> None:
        """Back the module's buffer of this name with the memory of `tensor`."""
        own = self._module.get_buffer(name)
        if own.dtype == tensor.dtype and own.device.type != "meta":
            own.data = tensor

    def keep(self, held: Collection[str]) -> None:
        """Move parameters that this process does not hold to the meta device."""
        self._elsewhere = self._owners.keys() - set(held)
        for name in self._elsewhere:
            own = self._now(name)
            if own.device.type != "meta":
                self._put(name, nn.Parameter(own.to("meta"), own.requires_grad))
        if self._elsewhere and not hasattr(self._module, _ELSEWHERE):
            setattr(self._module, _ELSEWHERE, True)
            self._module.register_state_dict_pre_hook(_refuse_state)

    def mark_gradients(self) -> None:
        """Set meta gradients on parameters of other processes, so that a sum over all gradients fails."""
        for name in self._elsewhere:
            own = self._now(name)
            if own.requires_grad:
                own.grad = torch.empty_like(own)

    def _now(self, name: str) -> nn.Parameter:
        owner, leaf = self._owners[name][0]
        found = owner._parameters[leaf]
        if found is None:
            raise UsageError(f"the parameter {name} was removed from the model; create a new pipeline of the new model")
        return found

    def _put(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        for owner, leaf in self._owners[name]:
            owner._parameters[leaf] = parameter
        return parameter


def check_whole(module: nn.Module) -> None:
    """Raise `UsageError` if other processes hold some of a trained module's parameters."""
    if hasattr(module, _ELSEWHERE):
        raise UsageError(
            f"some parameters of this {type(module).__name__} are in other processes, which trained it too; "
            "save it with pipe.save, and load that file into a new module"
        )


def _refuse_state(module: nn.Module, *_: Any) -> None:
    check_whole(module)
