"""Migration of a training run to another placement: tensors are sent by name, between processes' memory."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.deploy.state import Held, TrainState, Wanted, redistribute, source_of
from penstock.errors import UsageError, everywhere, exclude
from penstock.graph.ops import DTYPES
from penstock.train.arrangement import Arrangement
from penstock.train.captured import Captured
from penstock.train.features import Features
from penstock.train.held_tensors import IN_FLIGHT, HeldTensors, interleaved
from penstock.train.named_optimizer import NamedOptimizer
from penstock.train.optimizers import nothing
from penstock.train.placed_stages import PlacedStages
from penstock.train.plain_values import decode, encode
from penstock.train.trainer import Trainer
from penstock.transport.collectives import all_gather

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
