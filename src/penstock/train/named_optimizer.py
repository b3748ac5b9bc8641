"""Optimizer state and group settings by parameter names, so that an optimizer with other parameters restores them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.graph.ops import DTYPES
from penstock.tensors import HOST
from penstock.train.checkpoint_folder import CheckpointIndex, OptimizerGroup
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
                "names": names,
                "place": place,
                "schedules": per_group(schedulers, group),
            }
            for place, (group, names) in enumerate(zip(self._groups, self._names(), strict=True))
        ]

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


# lists of torch's schedulers with an entry for each group
_PER_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
_BUILD = "build groups by the names of parameters, as from pipe.named_parameters(), and as for the checkpoint"


def merged(gathered: Iterable[Sequence[Mapping[str, Any]]]) -> list[OptimizerGroup]:
    """Return the groups of all ranks; copies of a group, as of replicas, become one."""
    found: list[OptimizerGroup] = []
    for groups in gathered:
        for group in groups:
            made = OptimizerGroup(**group)
            copies = [each for each in found if _is_copy(each, made)]
            names = sorted({*made.names, *(name for each in copies for name in each.names)})
            found = [*(each for each in found if each not in copies), msgspec.structs.replace(made, names=names)]
    return found


def _is_copy(first: OptimizerGroup, other: OptimizerGroup) -> bool:
    alike = first.settings == other.settings and first.schedules == other.schedules and first.place == other.place
    return alike and (first.names == other.names or not set(first.names).isdisjoint(other.names))


def find_saved(groups: Sequence[Collection[str]], saved: Sequence[OptimizerGroup]) -> list[OptimizerGroup | None]:
    """Return the saved group of each group, given by the names of its parameters; None for one that was not saved.

    Raises `UsageError` if parameters of a group had other settings than others of it, or if groups had been one.
    """
    of_name = {name: number for number, group in enumerate(saved) for name in group.names}
    owners: dict[int, int] = {}
    found: list[OptimizerGroup | None] = []
    for place, names in enumerate(groups):
        if strange := sorted(set(names) - of_name.keys()):
            raise UsageError(
                f"{strange[0]} is in no group of the checkpoint's optimizer; {_BUILD}, or load it without the optimizer"
            )
        known = {of_name[name]: name for name in names}
        for number, name in known.items():
            if owners.setdefault(number, place) != place:
                raise UsageError(
                    f"{name} was in one group of the checkpoint's optimizer with other parameters; {_BUILD}"
                )
        first, *others = known or (None,)
        for other in others:
            _check_alike(saved, known, first, other)
        if first is None and not names:
            first = next((number for number, group in enumerate(saved) if group.place == place), None)
        found.append(None if first is None else saved[first])
    return found


def _check_alike(saved: Sequence[OptimizerGroup], known: Mapping[int, str], first: int | None, other: int) -> None:
    if first is None:
        return
    was, now = saved[first].settings, saved[other].settings
    for key in sorted({*was, *now}):
        if was.get(key) != now.get(key):
            raise UsageError(
                f"a group of the optimizer must have one {key}, but the checkpoint has {decode(was.get(key))} for "
                f"{known[first]} and {decode(now.get(key))} for {known[other]}; {_BUILD}"
            )


def per_group(schedulers: Sequence[Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the schedulers' lists that belong to a group."""
    found = {}
    for key, part, name in _lists(schedulers):
        values, groups = getattr(part, name), part.optimizer.param_groups
        place = next((place for place, each in enumerate(groups) if each is group), None)
        if place is not None and len(values) == len(groups):
            found[key] = encode(values[place], f"the scheduler's {name}")
    return found


def load_schedulers(
    schedulers: Sequence[Any], states: Sequence[Mapping[str, Any]], groups: Mapping[int, OptimizerGroup | None]
) -> None:
    """Restore schedulers from the states of rank 0, with the lists of this process's groups, by the group's id."""
    before = {key: getattr(part, name) for key, part, name in _lists(schedulers)}
    for scheduler, state in zip(schedulers, states, strict=False):  # schedulers may be empty
        scheduler.load_state_dict(decode(state))
    for key, part, name in _lists(schedulers):
        own, loaded = part.optimizer.param_groups, getattr(part, name)
        default = loaded if len(loaded) == len(own) else before.get(key, loaded)
        values = [
            decode(saved.schedules[key]) if saved is not None and key in saved.schedules else value
            for saved, value in zip([groups.get(id(group)) for group in own], default, strict=False)
        ]
        setattr(part, name, values)


def _lists(schedulers: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Return the lists with an entry for each group: a unique key, the scheduler and the list's name."""
    waiting = [(str(number), scheduler) for number, scheduler in enumerate(schedulers)]
    while waiting:
        place, part = waiting.pop()
        waiting += [(f"{place}.{number}", each) for number, each in enumerate(getattr(part, "_schedulers", ()))]
        if isinstance(getattr(part, "optimizer", None), torch.optim.Optimizer):
            yield from (
                (f"{place}/{name}", part, name) for name in _PER_GROUP if isinstance(getattr(part, name, None), list)
            )
