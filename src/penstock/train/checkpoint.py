"""Checkpoints that can be loaded with another number of stages or replicas: all state is stored by the model's names.

All processes share the folder: each writes the tensors of its stages, and rank 0 writes the index that completes the
checkpoint (see `checkpoint_folder.py`). Nothing in a checkpoint is pickled. A tensor used by several stages is saved
with the first of them.
"""

import base64
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.deploy.state import Held, TrainState, Wanted, redistribute, source_of
from penstock.errors import ModelError, UsageError
from penstock.train.agreement import agreed
from penstock.train.checkpoint_folder import (
    CheckpointIndex,
    DataPosition,
    OptimizerGroup,
    StageFiles,
    check_whole,
    drop_leftovers,
    new_save,
    next_suffix,
    read_index,
    reason_of,
    write_index,
    write_stages,
)
from penstock.train.held_tensors import holding
from penstock.train.loader import Loader
from penstock.train.named_optimizer import NamedOptimizer, load_schedulers, merged
from penstock.train.plain_values import encode
from penstock.train.trainer import Trainer
from penstock.wire import FEEDER

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
_SHOWS_S = 5.0  # timeout for a network file system to show another host's files


def save_checkpoint(
    trainer: Trainer,
    folder: Path,
    optimizers: Optimizers = None,
    schedulers: Any = None,
    *loaders: Loader,
    shows_s: float = _SHOWS_S,
) -> None:
    """Write a checkpoint to a shared folder (a collective call).

    The checkpoint includes the position in the data of the loader that was trained on, and of each given loader.

    An earlier checkpoint in the folder stays valid until the new one is complete, even if a process fails.

    Raises `ModelError` on every process if it cannot be written or if the hosts do not share the folder, `UsageError`
    for a setting that JSON cannot hold, and in a run with on_loss also if an optimizer or scheduler is missing.
    """
    if trainer.survivors is not None:
        _check_all_given(trainer, optimizers, schedulers)
    with trainer.world.explained():
        elastic = trainer.follower.state() if trainer.follower is not None else None

    @_writing()
    def begin() -> list[str]:
        return [next_suffix(folder) if trainer.world.rank == FEEDER else "", new_save()]

    suffix, save = agreed(trainer.together, begin)[FEEDER]
    gathered, state = _write(trainer, _Place(folder, suffix, save), optimizers, schedulers, loaders)

    @_writing()
    def finish() -> None:
        if trainer.world.rank == FEEDER:
            _check_shared(trainer, folder, [document["files"] for document in gathered], shows_s)
            index = _index(trainer, state, gathered, elastic, save)
            write_index(folder, index)
            drop_leftovers(folder, set(index.places.values()))

    agreed(trainer.together, finish)
    if trainer.survivors is not None:
        trainer.survivors.saw_checkpoint(folder)


def _check_all_given(trainer: Trainer, optimizers: Optimizers, schedulers: Any) -> None:
    """Raise `UsageError` unless the checkpoint contains all state needed to recover from a lost process."""
    for what, given, has, say in (
        ("optimizers", _each(optimizers), trainer.optimizers, "every optimizer made by pipe.optimizer"),
        ("schedulers", _each(schedulers), trainer.schedulers, "every scheduler registered with pipe.scheduler"),
    ):
        if {id(each) for each in given} != {id(each) for each in has}:
            raise UsageError(
                f"a run with on_loss recovers from its last checkpoint, which must hold exactly the "
                f"{len(has)} {what} of this run, but {len(given)} were given; pass save_checkpoint a list of {say}"
            )


def _each(given: Any) -> tuple[Any, ...]:
    """Convert a single value, a list of values or None to a tuple."""
    return () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)


@dataclass(frozen=True, slots=True)
class _Place:
    """The folder of a save, the suffix of its stages' folders, and its unique name."""

    folder: Path
    suffix: str
    save: str


def _write(
    trainer: Trainer, place: _Place, optimizers: Optimizers, schedulers: Any, loaders: Sequence[Loader]
) -> tuple[list[dict[str, Any]], TrainState]:
    """Write the stages of every process; returns the documents of all ranks, and this rank's state.

    All state is read in one exchange: if a process were lost between two exchanges, training could roll back in
    between, and the parts would not match.
    """
    states: list[TrainState] = []

    def write() -> dict[str, Any]:
        named = NamedOptimizer(trainer.now.tensors, *_each(optimizers))
        state = TrainState(tensors=_saved_tensors(trainer), slots=named.slots(), step=trainer.step)
        states[:] = [state]
        # encoded before anything is written
        scalars, groups = encode(state.scalars(), "the optimizer's state"), named.groups(_each(schedulers))
        schedules = [scheduler_state(each, "save it yourself next to the checkpoint") for each in _each(schedulers)]
        own = _written_here(trainer, state, place.suffix)
        with _writing():
            files = write_stages(place.folder, own, place.save)
        shapes = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for tensors in own.values()
            for name, tensor in tensors.items()
        }
        return {
            "files": files,
            "shapes": shapes,
            "places": {name: stage for stage, tensors in own.items() for name in tensors},
            "scalars": scalars,
            "groups": groups,
            "schedules": schedules,
            "loaders": [loader.state() for loader in loaders],
            "trained": [number for number, loader in enumerate(loaders) if loader.was_trained],
        }

    return agreed(trainer.together, write), states[0]


def load_checkpoint(
    trainer: Trainer, folder: Path, optimizers: Optimizers = None, schedulers: Any = None, *loaders: Loader
) -> None:
    """Continue from a checkpoint, with any number of stages and replicas (a collective call).

    Raises `ModelError` if the folder has no checkpoint, a damaged one, or one that a host cannot read, `UsageError` if
    the checkpoint is of another model, naming the difference.
    """
    index = _read_everywhere(trainer, folder)
    if index.elastic is not None:
        if trainer.follower is None:
            raise UsageError(f"the checkpoint {folder} is of an elastic training run; continue with elastic training")
        trainer.follower.restore(index.elastic)
    places: Mapping[str, str] = index.places
    _check_names(trainer, places)
    tensors = {name: x for name, x in _saved_tensors(trainer).items() if f"model/{name}" in places}
    state = TrainState(tensors=tensors, step=index.step, random=index.random_state())
    _check_shapes(folder, index, tensors)
    _check_schedulers(folder, index, schedulers)
    named = NamedOptimizer(trainer.now.tensors, *_each(optimizers))
    groups = _find_groups(trainer, named, index)
    if _each(optimizers):
        state.slots = named.restore(index, groups)
    wanted, files = state.named(), StageFiles(folder, places)
    here = dict.fromkeys(wanted, (trainer.world.rank,))  # the tensors are in files, which every process can read
    with torch.no_grad():
        for name, tensor in redistribute(
            Held(here, files.load), Wanted(here, wanted.__getitem__), trainer.world.transport
        ):
            wanted[name].copy_(tensor)
    trainer.step = state.step
    load_schedulers(_each(schedulers), index.schedulers, groups)
    for loader, place in zip(loaders, index.loaders, strict=False):
        loader.resume({"epoch": place.epoch, "position": place.position})
    torch.set_rng_state(state.random)
    if trainer.survivors is not None:
        trainer.survivors.saw_checkpoint(folder)


def _find_groups(
    trainer: Trainer, named: NamedOptimizer, index: CheckpointIndex
) -> Mapping[int, OptimizerGroup | None]:
    """Find the saved settings of each group; raises `UsageError` on all ranks if groups of one of them do not match."""
    groups: dict[int, OptimizerGroup | None] = {}
    agreed(trainer.together, lambda: groups.update(named.saved_groups(index.groups)), UsageError)
    return groups


def _check_schedulers(folder: Path, index: CheckpointIndex, schedulers: Any) -> None:
    """Raise `UsageError` unless there are as many schedulers as were saved, or none is given."""
    given, kept = len(_each(schedulers)), len(index.schedulers)
    if given and given != kept:
        raise UsageError(
            f"the checkpoint {folder} was written with {kept or 'no'} scheduler{'s' * (kept > 1)}, and {given} "
            f"{'is' if given == 1 else 'are'} given; pass the same number, or none"
        )


def _saved_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the parameters and buffers that this process holds; constants are part of the model."""
    held = trainer.now.tensors
    buffers = {s.source for part in trainer.now.parts for s in part.program.states if s.kind == "buffer"}
    names = [*held.parameters, *(name for name in held.others if name in buffers), *held.unused]
    return {name: held.find(name) for name in names}


def _written_here(trainer: Trainer, state: TrainState, suffix: str) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that this process writes, by stage folder and name; each is written by its first holder."""
    named = state.named()
    holders = {name: trainer.now.tensors.holders(source_of(name)) for name in named}
    have = Held(holders, named.__getitem__)
    want = Wanted({name: ranks[:1] for name, ranks in holders.items()}, named.__getitem__)
    own: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in redistribute(have, want, trainer.world.transport):
        stages = holding(trainer.now.parts, source_of(name))
        own[f"{f'stage-{stages[0]}' if stages else 'unused'}{suffix}"][name] = tensor
    return own


def _index(
    trainer: Trainer,
    state: TrainState,
    gathered: Sequence[Mapping[str, Any]],
    elastic: dict[str, Any] | None,
    save: str,
) -> CheckpointIndex:
    first = gathered[FEEDER]
    loaders = [DataPosition(**loader) for loader in first["loaders"]]
    # the last one, if none was trained on
    trained = next(iter(first["trained"]), len(loaders) - 1) if loaders else None
    return CheckpointIndex(
        model=trainer.now.captured.graph.model, step=state.step, num_stages=trainer.now.placed.num_stages,
        num_replicas=len(trainer.now.placed.grid.replicas), places=_merged(gathered, "places"),
        shapes={name: (dtype, shape) for name, (dtype, shape) in _merged(gathered, "shapes").items()},
        scalars=_merged(gathered, "scalars"), groups=merged(document["groups"] for document in gathered),
        schedulers=first["schedules"], loaders=loaders, trained=trained,
        random=base64.b64encode(state.random.numpy().tobytes()).decode(), files=_merged(gathered, "files"),
        elastic=elastic, save=save,
    )  # fmt: skip


def scheduler_state(scheduler: Any, otherwise: str) -> dict[str, Any]:
    """Encode a scheduler's state as JSON values; raises `UsageError` with advice if this is impossible."""
    try:
        state: dict[str, Any] = encode(scheduler.state_dict(), "the scheduler's state")
    except UsageError as error:
        raise UsageError(f"{error}; {otherwise}") from None
    return state


def _merged(gathered: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {name: value for document in gathered for name, value in document[key].items()}


def _check_shared(trainer: Trainer, folder: Path, files: Sequence[Mapping[str, int]], shows_s: float) -> None:
    """Check that this process sees the files of all ranks; raises `ModelError` naming the host of a missing file."""
    deadline = time.monotonic() + shows_s
    for rank, written in enumerate(files):
        for file in written:
            while not (folder / file).exists():
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"all hosts must share a checkpoint's folder, but {_host(trainer, FEEDER)} does "
                        f"not see {folder / file}, which {_host(trainer, rank)} has written; use a shared folder"
                    )
                time.sleep(0.1)


def _host(trainer: Trainer, rank: int) -> str:
    """Return the name of a process, with its host unless the name contains it."""
    name = trainer.world.names[rank]
    host = trainer.world.hosts[rank] if rank < len(trainer.world.hosts) else name
    return name if host in name else f"{name} on {host}"


def _read_everywhere(trainer: Trainer, folder: Path) -> CheckpointIndex:
    """Read and check the index on every rank; raises the first error on all ranks."""
    found: list[CheckpointIndex] = []

    def read() -> None:
        found[:] = [read_index(folder)]
        check_whole(folder, found[0])

    def named(rank: int, reason: str) -> str:
        if rank == FEEDER:
            return reason
        return (
            f"all hosts must share a checkpoint's folder, but {_host(trainer, rank)} cannot read it although "
            f"{_host(trainer, FEEDER)} can: {reason}"
        )

    agreed(trainer.together, read, named=named)
    return found[0]


def _check_shapes(folder: Path, index: CheckpointIndex, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        shape = index.shapes[f"model/{name}"][1]
        if list(tensor.shape) != shape:
            raise UsageError(
                f"the checkpoint {folder} is of another model: {name} is {shape} there and {list(tensor.shape)} here; "
                "load it into the model that it was written from"
            )


def _check_names(trainer: Trainer, places: Mapping[str, str]) -> None:
    saved = {name.removeprefix("model/") for name in places if name.startswith("model/")}
    here = {s.source for part in trainer.now.parts for s in part.program.states if s.kind != "constant"}
    # tensors that no stage uses are optional: frozen layers use fewer tensors
    known = {*trainer.now.captured.unused, *(state.source for state in trainer.now.captured.graph.states)}
    missing, more = sorted(here - saved), sorted(saved - here - known)
    if missing or more:
        parts = [f"it lacks {', '.join(missing[:3])}"] if missing else []
        parts += [f"it also has {', '.join(more[:3])}"] if more else []
        raise UsageError(
            f"the checkpoint is of another model than {trainer.now.captured.graph.model}: {' and '.join(parts)} "
            f"({len(missing) + len(more)} names differ); load it into the model that it was written from"
        )


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Replace any error of storage by a `ModelError`, since the other ranks wait for it."""
    try:
        yield
    except UsageError as error:
        raise ModelError(str(error)) from error
    # catch any storage error, since the other ranks wait for a report
    except Exception as error:
        raise ModelError(
            f"the checkpoint cannot be written: {reason_of(error)}; choose another folder or make room"
        ) from error
