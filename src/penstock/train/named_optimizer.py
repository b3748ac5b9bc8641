"""Optimizer state by the model's parameter names, so that an optimizer with other parameters can restore it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.graph.encoding import DTYPES
from penstock.tensors import HOST
from penstock.train.checkpoint_folder import CheckpointIndex, OptimizerGroup
from penstock.train.group_settings import find_saved, per_group
from penstock.train.held_tensors import HeldTensors
from penstock.train.plain_values import decode, encode


class NamedOptimizer:
    """Several optimizers of a process's parameters, treated as one optimizer with all groups concatenated.

    Raises `UsageError` if a parameter is in two optimizers.
    """

    def __init__(self, tensors: HeldTensors, *optimizers: torch.optim.Optimizer) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        owners: dict[int, torch.optim.Optimizer] = {}
        for optimizer in optimizers:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if owners.setdefault(id(parameter), optimizer) is not optimizer:
                    raise UsageError("two optimizers share a parameter; pass each parameter to one optimizer")
        self._named = {name: p for name, p in tensors.parameters.items() if id(p) in owners}
        self._owners = {name: owners[id(parameter)] for name, parameter in self._named.items()}

    def slots(self) -> dict[str, dict[str, Any]]:
        """Return the current state of each parameter."""
        return {name: dict(self._owners[name].state.get(parameter, {})) for name, parameter in self._named.items()}

    def groups(self, schedulers: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the groups: their settings, the names of their parameters, their entries in the schedulers' lists.

        Raises `UsageError` for a setting that JSON cannot hold.
        """
        return [
            {
                "settings": {
                    k: encode(v, f"the optimizer's setting {k!r}")
                    for k, v in group.items()
                    if k not in {"params", "param_names"}
                },
                "names": names, "place": place, "schedules": per_group(schedulers, group),
            }
            for place, (group, names) in enumerate(zip(self._groups, self._names(), strict=True))
        ]  # fmt: skip

    def plain_settings(self) -> list[dict[str, Any]]:
        """Return the numbers and texts among the groups' settings."""
        return [
            {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str))}
            for group in self._groups
        ]

    def _names(self) -> list[list[str]]:
        """Return the names of each group's parameters."""
        names = {id(parameter): name for name, parameter in self._named.items()}
        return [[names[id(p)] for p in group["params"] if id(p) in names] for group in self._groups]

    def saved_groups(self, saved: Sequence[OptimizerGroup]) -> dict[int, OptimizerGroup | None]:
        """Return the checkpoint's group for each group, by the group's id; raises `UsageError` if they do not match."""
        return {id(group): was for group, was in zip(self._groups, find_saved(self._names(), saved), strict=True)}

    def places(self) -> dict[str, int]:
        """Return the index of each parameter's group."""
        numbers = {id(p): number for number, group in enumerate(self._groups) for p in group["params"]}
        return {name: numbers[id(parameter)] for name, parameter in self._named.items()}

    def restore(self, index: CheckpointIndex, groups: Mapping[int, OptimizerGroup | None]) -> dict[str, dict[str, Any]]:
        """Restore settings from a checkpoint, and allocate and return the state tensors of each parameter.

        `groups` are those of `saved_groups`. State that is not in the checkpoint is discarded.
        """
        for group in self._groups:
            if (saved := groups[id(group)]) is not None:
                restore_settings(group, saved.settings)
        found: dict[str, dict[str, Any]] = {}
        for place, (dtype, shape) in index.shapes.items():
            kind, *rest = place.split("/", 2)
            if kind == "optimizer" and rest[1] in self._named:
                slot, name = rest
                device = self.place_of(self._owners[name], self._named[name])(slot)
                found.setdefault(name, {})[slot] = torch.zeros(shape, dtype=DTYPES[dtype], device=device)
        for name, parameter in self._named.items():
            kept = decode(index.scalars.get(name, {})) | found.get(name, {})
            self._owners[name].state.pop(parameter, None)
            if kept:
                self._owners[name].state[parameter] = kept
        return found

    @staticmethod
    def place_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Callable[[str], torch.device]:
        """Return a function from a slot to its device: the parameter's device, or the host for step counts."""
        group = next(group for group in optimizer.param_groups if _is_in(parameter, group))
        steps_on_host = not (group.get("capturable") or group.get("fused"))
        return lambda slot: HOST if slot == "step" and steps_on_host else parameter.device


def restore_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set an optimizer group's settings from JSON values."""
    for key, value in settings.items():
        now, found = group.get(key), decode(value)
        if isinstance(now, Tensor):
            found = torch.as_tensor(found, dtype=now.dtype, device=now.device)
        group[key] = found


def _is_in(parameter: nn.Parameter, group: Mapping[str, Any]) -> bool:
    return any(parameter is member for member in group["params"])
