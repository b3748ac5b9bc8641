"""Settings of optimizer groups in a checkpoint, found again by the names of their parameters.

Groups may differ between processes, as those of a learning rate for each layer do, and another number of processes has
other groups. So a group is known by its parameters, not by its index; an index only serves groups without parameters.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from penstock.errors import UsageError
from penstock.train.checkpoint_folder import OptimizerGroup
from penstock.train.plain_values import decode, encode

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
