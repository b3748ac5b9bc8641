"""Migration of a training run to another placement: tensors are sent by name, between processes' memory.

The grid for the processes that remain is chosen by the planner or their number, and placed so that few bytes move. A
part is the stages that one rank holds in a placement.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.deploy.deployment import name_devices
from penstock.deploy.policies import choose_cuts
from penstock.deploy.run_options import OnLoss
from penstock.deploy.state import Held, TrainState, Wanted, redistribute, source_of
from penstock.engine.placement import Grid
from penstock.errors import CutError, DeviceLost, UsageError, everywhere, exclude
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.freeze import sources_in
from penstock.graph.ops import DTYPES
from penstock.plan.choose import cluster_among
from penstock.plan.cost.frozen import keep_cuts
from penstock.plan.cost.training_step import ADAMW_STATE
from penstock.spec.cluster import Cluster, Device
from penstock.spec.profile import Profile
from penstock.train.arrangement import Arrangement, common_cuts, grid_of_plan, plan_training
from penstock.train.captured import Captured
from penstock.train.features import Features
from penstock.train.held_tensors import IN_FLIGHT, HeldTensors, interleaved
from penstock.train.named_optimizer import NamedOptimizer
from penstock.train.optimizers import nothing
from penstock.train.placed_stages import PlacedStages
from penstock.train.plain_values import decode, encode
from penstock.train.trainer import Trainer
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER

_GRADIENT = "penstock.grad"  # an accumulated `.grad` moves like an entry of the optimizer's state with this key


@dataclass(frozen=True, slots=True)
class Migration:
    """The cost of a migration over all processes: seconds and bytes."""

    seconds: float = 0.0
    moved_bytes: int = 0


def migrate(
    trainer: Trainer, placed: Arrangement, captured: Captured | None = None, features: Features | None = None
) -> Migration:
    """Migrate a training run to another placement between two steps; every process passes the same placement.

    Parameters, buffers, gradients and optimizer state are sent by name to the processes that need and lack them. The
    user's optimizers stay the same objects: their groups and state are changed in place. `captured` is the model with
    more layers frozen; optimizers drop those layers. If `placed` skips stages, `features` has the outputs of these
    stages. Errors are raised before any tensor is moved.

    Example:
        migrate(trainer, trainer.now.placed.moved(grid, cuts))

    Raises `UsageError` if optimizers differ between processes, or if the run is traced.
    """
    exclude("the trace", trainer.tracer is not None, "a trace must have one plan, but this run changes its plan")
    transport = trainer.world.transport
    begin_s, sent_bytes = trainer.world.clock(), transport.sent_bytes
    with trainer.world.explained():
        prepared = prepare(trainer, placed, captured, features)
        gathered = all_gather(transport, {"bytes": transport.sent_bytes - sent_bytes})
        prepared.commit()
    seconds = trainer.world.clock() - begin_s
    return Migration(seconds, sum(document["bytes"] for document in gathered))


class Prepared:
    """A migration whose tensors have arrived but that is not committed; `now` has this process's future stages."""

    def __init__(self, trainer: Trainer, now: PlacedStages, optimizers: "Sequence[_Arrived]") -> None:
        self.now = now
        self._trainer, self._optimizers = trainer, optimizers

    def commit(self) -> None:
        """Switch the trainer to the new placement; sends nothing."""
        self._trainer.now = self.now
        for optimizer, arrived in zip(self._trainer.optimizers, self._optimizers, strict=True):
            _rebuild(optimizer, arrived)


def prepare(
    trainer: Trainer, placed: Arrangement, captured: Captured | None = None, features: Features | None = None
) -> Prepared:
    """Send all tensors that another placement needs. `trainer.now` stays until `commit`, but runs no further step.

    Every process calls this, and commits once all ranks have finished preparing.
    """
    before = trainer.now
    optimizers = gather_groups(trainer)
    before.close()
    now = PlacedStages(
        trainer.world, captured or before.captured, placed, before.how, before.head, before=before, features=features
    )
    arrived = [
        _move(trainer, optimizer, dataclasses.replace(told, groups=groups), before.tensors, now)
        for optimizer, told, groups in zip(trainer.optimizers, optimizers, trainer.known_groups, strict=True)
    ]
    return Prepared(trainer, now, arrived)


def gather_groups(trainer: Trainer) -> "list[_Told]":
    """Gather the description of each optimizer's state from all ranks, and record the parameters' groups."""
    optimizers = [_gather(trainer, optimizer, trainer.now.tensors) for optimizer in trainer.optimizers]
    _remember_groups(trainer, optimizers)
    return optimizers


@dataclass(frozen=True, slots=True)
class _Told:
    """The gathered description of one optimizer: each parameter's group, its slots' dtypes and shapes, its scalars."""

    groups: Mapping[str, int]
    slots: Mapping[str, Mapping[str, tuple[str, list[int]]]]
    scalars: Mapping[str, Mapping[str, Any]]


def _gather(trainer: Trainer, optimizer: torch.optim.Optimizer, tensors: HeldTensors) -> _Told:
    """Gather the description of this optimizer's state from all ranks, before any tensor is moved."""
    named = NamedOptimizer(tensors, optimizer)
    state = TrainState(tensors={}, slots=_slots(named, tensors))
    mine = {
        "groups": named.places(),
        "count": len(optimizer.param_groups),
        # a process that joins takes over the settings only afterwards
        "settings": named.plain_settings() if trainer.survivors is None else [],
        "slots": {
            name: {
                slot: [str(value.dtype).removeprefix("torch."), list(value.shape)]
                for slot, value in held.items()
                if isinstance(value, Tensor)
            }
            for name, held in state.slots.items()
        },
        "scalars": encode(state.scalars(), "the optimizer's state"),
    }
    groups: dict[str, int] = {}
    slots: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    gathered = all_gather(trainer.world.transport, mine)
    _check_same_groups(gathered, mine, trainer.world.names, trainer.world.rank)
    for document in gathered:
        groups |= document["groups"]
        slots |= document["slots"]
        scalars |= decode(document["scalars"])
    return _Told(groups, slots, scalars)


@everywhere()
def _check_same_groups(
    gathered: Sequence[Mapping[str, Any]], mine: Mapping[str, Any], names: Sequence[str], rank: int
) -> None:
    """Raise `UsageError` on every process unless an optimizer has the same groups with the same settings on all."""
    for other, document in zip(names, gathered, strict=True):
        if document["count"] != mine["count"]:
            raise UsageError(
                f"the optimizer has {mine['count']} groups of parameters on {names[rank]} and {document['count']} on "
                f"{other}, so parameters cannot move between these processes; use the same groups everywhere, empty if "
                "a process has no parameters for one"
            )
        if document["settings"] != mine["settings"]:
            raise UsageError(
                f"a group of the optimizer has other settings on {names[rank]} than on {other}, so parameters cannot "
                f"move between these processes: {mine['settings']} and {document['settings']}; use the same groups "
                "everywhere, empty if a process has none for one"
            )


def _remember_groups(trainer: Trainer, told: Sequence[_Told]) -> None:
    """Record each parameter's group, since its optimizer may drop it (frozen) or all its holders may be lost."""
    known = trainer.known_groups
    known.extend({} for _ in range(len(told) - len(known)))
    for groups, each in zip(known, told, strict=True):
        groups |= each.groups


def _slots(named: NamedOptimizer, tensors: HeldTensors) -> dict[str, dict[str, Any]]:
    """Return the tensors that move with each parameter: the optimizer's slots, and a pending gradient."""
    slots: dict[str, dict[str, Any]] = named.slots()
    for name, held in slots.items():
        gradient = tensors.parameters[name].grad
        if gradient is not None:
            held[_GRADIENT] = gradient
    return slots


@dataclass(frozen=True, slots=True)
class _Arrived:
    """The future state of an optimizer on this process: its parameters, their groups and their slots."""

    parameters: Mapping[str, nn.Parameter]
    slots: Mapping[str, dict[str, Any]]
    groups: Mapping[str, int]


def _move(
    trainer: Trainer, optimizer: torch.optim.Optimizer, told: _Told, before: HeldTensors, now: PlacedStages
) -> _Arrived:
    """Send an optimizer's state to the new holders of its parameters."""
    after, transport = now.tensors, trainer.world.transport
    own = TrainState(tensors={}, slots=_slots(NamedOptimizer(before, optimizer), before)).named()
    trained = [name for name in now.order if name in told.groups and name in now.captured.trainable]
    shapes = {f"optimizer/{slot}/{name}": shape for name in trained for slot, shape in told.slots.get(name, {}).items()}
    have = Held({entry: before.holders(source_of(entry)) for entry in shapes}, own.__getitem__)

    def room(entry: str) -> Tensor:
        dtype, shape = shapes[entry]
        return torch.zeros(shape, dtype=DTYPES[dtype])

    order = interleaved({entry: ranks[0] for entry, ranks in have.ranks.items()})
    want = Wanted({entry: after.holders(source_of(entry)) for entry in order}, room)
    slots: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for entry, tensor in redistribute(have, want, transport, in_flight=IN_FLIGHT):
        slots[source_of(entry)][entry.split("/", 2)[1]] = tensor
    for name, scalars in told.scalars.items():
        if name in after.parameters and name in trained:
            slots[name] |= scalars
    here = {name: after.parameters[name] for name in trained if name in after.parameters}
    return _Arrived(here, slots, told.groups)


def _rebuild(optimizer: torch.optim.Optimizer, arrived: _Arrived) -> None:
    """Replace an optimizer's groups and state in place; its settings and references to it stay valid."""
    parameters = arrived.parameters
    named: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for name, parameter in parameters.items():
        named[arrived.groups[name]].append(parameter)
    for group, members in zip(optimizer.param_groups, named, strict=True):
        group["params"][:] = members
    if not parameters:  # torch's optimizers need at least one parameter
        optimizer.param_groups[0]["params"].append(nothing())
    optimizer.state.clear()
    for name, parameter in parameters.items():
        held = dict(arrived.slots.get(name, {}))
        gradient = held.pop(_GRADIENT, None)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
        if held:
            by_slot = NamedOptimizer.place_of(optimizer, parameter)
            optimizer.state[parameter] = {
                slot: value.to(by_slot(slot)) if isinstance(value, Tensor) else value for slot, value in held.items()
            }


def fix_microbatches(trainer: Trainer) -> None:
    """Fix each replica's number of microbatches, so that rows fall into the same microbatches in any placement.

    No tensor moves; the total over all replicas is unchanged.
    """
    trainer.now.placed = trainer.now.placed.fixed()


_ALIKE = 0.05  # relative measurement error of speeds and memory sizes


def missing_bytes(
    placed: Arrangement, captured: Captured, tensors: HeldTensors, ranks: Sequence[int], state_factor: float
) -> list[list[float]]:
    """Return `missing[device][part]` for `assign`: the bytes that a rank lacks to take over a part of a placement.

    For a trained tensor the optimizer's state is added: `state_factor` times the tensor's size.
    """
    bounds = [0, *(cut.position for cut in placed.cuts), len(captured.graph.ops)]
    sizes = {
        state.source: state.value.num_bytes({}) * (1 + state_factor * (state.source in captured.trainable))
        for state in captured.graph.states
        if state.kind != "constant"
    }
    of_stage = [sources_in(captured.graph, start, end) for start, end in pairwise(bounds)]
    needs = [
        set[str]().union(*(of_stage[stage] for stage in placed.grid.stages_of(part))) & sizes.keys() for part in ranks
    ]
    holders = {name: set(tensors.holders(name)) for name in sizes}
    return [
        [sum(sizes[name] for name in needs[part] if device not in holders[name]) for part in range(len(ranks))]
        for device in ranks
    ]


def assign(missing: Sequence[Sequence[float]], alike: Sequence[Sequence[int]]) -> list[int]:
    """Return the device of each part, chosen to move few bytes: equivalent devices may swap parts.

    `missing[device][part]` is the number of bytes of a part that a device lacks; `alike` are groups of devices that may
    swap parts. Pairs are swapped as long as that reduces the total.

    >>> assign([[9, 0], [0, 9]], [[0, 1]])
    [1, 0]
    """
    taken = list(range(len(missing)))  # the device of each part
    better = True
    while better:
        better = False
        for group in alike:
            for i, first in enumerate(group):
                for second in group[i + 1 :]:
                    one, other = taken[first], taken[second]
                    now = missing[one][first] + missing[other][second]
                    if missing[other][first] + missing[one][second] < now:
                        taken[first], taken[second] = other, one
                        better = True
    return taken


def interchangeable(devices: Sequence[Device]) -> list[list[int]]:
    """Group devices that may swap parts: with equal bandwidth and, within measurement error, equal speed and memory."""
    groups: list[list[int]] = []
    for number, device in enumerate(devices):
        for group in groups:
            first = devices[group[0]]
            if (
                math.isclose(first.speed, device.speed, rel_tol=_ALIKE)
                and math.isclose(first.memory_bytes, device.memory_bytes, rel_tol=_ALIKE)
                and first.bandwidth_bytes_per_s == device.bandwidth_bytes_per_s
            ):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def lost_names(captured: Captured, tensors: HeldTensors) -> Collection[str]:
    """Return the names of model state that no process holds any longer."""
    states = (state for state in captured.graph.states if state.kind != "constant")
    return [state.source for state in states if not tensors.holders(state.source)]


def cuts_here(captured: Captured, names: Sequence[str]) -> list[Cut]:
    """Find cuts by the names that rank 0 sent; raises `DeviceLost` if this process's model lacks one."""
    try:
        return Cuts(captured.graph).find_all(names)
    except CutError as error:
        raise DeviceLost(f"this process cannot apply the placement of rank 0: {error}") from error


def choose_grid(trainer: Trainer, begun: Arrangement, options: OnLoss) -> tuple[Grid, Sequence[Cut]]:
    """Return grid and cuts for the current group, with parts assigned to ranks that already hold most of their tensors.

    Raises `PlanError` if no plan fits the devices.
    """
    ranks = list(range(trainer.world.transport.size))
    groups: Sequence[Sequence[int]] = [ranks]
    if options.profile is not None and options.cluster is not None:
        grid, cuts, groups = _planned(trainer, begun, options.profile, options.cluster)
    else:
        grid, cuts = _by_number(trainer, begun, len(ranks))
    placed = begun.moved(grid, cuts, rank=FEEDER)
    taken = assign(missing_bytes(placed, trainer.now.captured, trainer.now.tensors, ranks, ADAMW_STATE), groups)
    return grid.renumbered(dict(zip(ranks, taken, strict=True))), cuts


def _planned(
    trainer: Trainer, begun: Arrangement, profile: Profile, known: Cluster
) -> tuple[Grid, Sequence[Cut], Sequence[Sequence[int]]]:
    """Return the planner's grid and cuts for these devices, and groups of ranks that may swap parts."""
    ranks = name_devices(trainer.world)
    cluster = cluster_among(known, list(ranks), feeder=trainer.world.hosts[FEEDER])
    batch = trainer.data.trained
    rows = profile.rows[-1] if batch is None else max(1, len(batch.samples) // begun.all_microbatches)
    costs = keep_cuts(profile, common_cuts(trainer.now.captured))
    plan = plan_training(costs, cluster, begun, rows=rows, state_factor=ADAMW_STATE)
    return *grid_of_plan(trainer.now.captured.graph, plan, ranks), interchangeable(cluster.devices)


def _by_number(trainer: Trainer, begun: Arrangement, num_processes: int) -> tuple[Grid, Sequence[Cut]]:
    """Return a grid for a number of processes, and its cuts: the initial grid, or as many replicas as fit."""
    grid = begun.grid if num_processes == len(begun.grid.ranks) else begun.shape(num_processes)
    first = grid.replicas[0]
    if len(first.stages) == begun.num_stages:
        return grid, begun.cuts
    graph = trainer.now.captured.graph
    return grid, choose_cuts(
        graph, Cuts(graph), stages=len(first.stages), places=[first.devices.index(rank) for rank in first.stages]
    )
