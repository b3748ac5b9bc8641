"""Checkpoints that continue with another number of stages or replicas: everything by the model's own names.

The folder is one that all processes share: each writes its own stages' tensors there, and the first one the index
that makes a checkpoint of them (see `checkpoint_index.py`). Nothing in a checkpoint is pickled. A tensor that several
stages have is saved by the first of them.
"""

import base64
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.errors import ModelError, PenstockError, UsageError
from penstock.graph.encoding import DTYPES
from penstock.tensors.devices import HOST
from penstock.train.checkpoint_index import (
    CheckpointIndex,
    DataPosition,
    OptimizerGroup,
    read_index,
    write_index,
)
from penstock.train.checkpoint_stages import (
    check_whole,
    drop_leftovers,
    next_suffix,
    read_stages,
    reason_of,
    write_stages,
)
from penstock.train.loader import Loader
from penstock.train.tensors import holding
from penstock.train.trainer import Trainer
from penstock.transport.base import FEEDER
from penstock.transport.collectives import exchange

_Found = TypeVar("_Found")
_SHOWS_S = 5.0  # after which a network's file system shows what another host has written


def save_checkpoint(
    trainer: Trainer, folder: Path, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None,
    loader: Loader | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint; every process calls this, with a folder that all of them share.

    Whatever dies or fails meanwhile, an earlier checkpoint in the folder stays whole until the later one is.

    Raises `ModelError` on every process where it cannot be written or where the hosts do not share the folder,
    `UsageError` for a setting that JSON cannot hold.
    """
    suffix = _agree(trainer, lambda: next_suffix(folder) if trainer.world.rank == FEEDER else "")
    own, scalars = _own_tensors(trainer, optimizer, suffix)
    groups = _groups(trainer, optimizer) if optimizer is not None else []
    failed, files = _attempt(lambda: write_stages(folder, own))
    places = {name: stage for stage, tensors in own.items() for name in tensors}
    shapes = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for tensors in own.values() for name, tensor in tensors.items()
    }  # fmt: skip
    with trainer.explained():
        told = exchange(
            trainer.world.transport,
            {"failed": failed, "files": files or {}, "places": places, "shapes": shapes, "scalars": scalars,
             "groups": groups},
        )  # fmt: skip
    _raise_first(told)

    def finish() -> None:
        if trainer.world.rank == FEEDER:
            _check_shared(trainer, folder, [document["files"] for document in told])
            index = _index(trainer, told, scheduler, loader)
            write_index(folder, index)
            drop_leftovers(folder, set(index.places.values()))

    _agree(trainer, finish)


def load_checkpoint(
    trainer: Trainer, folder: Path, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None,
    loader: Loader | None = None,
) -> None:  # fmt: skip
    """Continue from a checkpoint, with any number of stages and replicas; every process calls this.

    Raises `ModelError` for a folder that holds no checkpoint, a damaged one or one that a host does not see,
    `UsageError` for one of another model, naming what differs.
    """
    index = _read_everywhere(trainer, folder)
    places: Mapping[str, str] = index.places
    _check_names(trainer, places)
    wanted: dict[str, Tensor] = {}
    sources = [*trainer.tensors.parameters, *trainer.tensors.others, *trainer.tensors.unused]
    for source in sources:
        if f"model/{source}" in places:
            wanted[f"model/{source}"] = _target(trainer, source)
    _check_shapes(folder, index, wanted)
    if optimizer is not None:
        _restore_settings(optimizer, index.groups, _optimizer_names(trainer, optimizer))
        for source, parameter in _optimizer_names(trainer, optimizer).items():
            state = optimizer.state[parameter]
            state.update(index.scalars.get(source, {}))
            for key in _keys(places, source):
                dtype, shape = index.shapes[f"optimizer/{key}/{source}"]
                device = _state_device(optimizer, parameter, key)
                state[key] = wanted[f"optimizer/{key}/{source}"] = torch.zeros(
                    shape, dtype=DTYPES[dtype], device=device
                )
    read_stages(folder, places, wanted)
    trainer.step = index.step
    if scheduler is not None:
        if index.scheduler is None:
            raise UsageError(f"the checkpoint {folder} was written without a scheduler; load it without one")
        scheduler.load_state_dict(index.scheduler)
    if loader is not None and index.loader is not None:
        loader.resume({"epoch": index.loader.epoch, "position": index.loader.position})
    torch.set_rng_state(index.random_state())


def _own_tensors(
    trainer: Trainer, optimizer: torch.optim.Optimizer | None, suffix: str
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]:
    """Return what this process saves: tensors by stage's folder and name, and the optimizer's other values."""
    names = _optimizer_names(trainer, optimizer)
    own: dict[str, dict[str, Tensor]] = defaultdict(dict)
    scalars: dict[str, dict[str, Any]] = {}
    for source, tensor in _saved_here(trainer).items():
        stage = f"stage-{holding(trainer.parts, source)[0]}{suffix}"
        own[stage][f"model/{source}"] = tensor.detach()
        if optimizer is not None and source in names:
            state = optimizer.state.get(names[source], {})
            own[stage] |= {f"optimizer/{key}/{source}": v for key, v in state.items() if isinstance(v, Tensor)}
            scalars[source] = {key: v for key, v in state.items() if not isinstance(v, Tensor)}
    if trainer.tensors.unused:
        own[f"unused{suffix}"] = {f"model/{source}": tensor for source, tensor in trainer.tensors.unused.items()}
    return own, scalars


def _saved_here(trainer: Trainer) -> dict[str, Tensor]:
    """Return the tensors that this process saves: of the first replica, each by the first stage that has it."""
    if trainer.placed.replica_index:
        return {}
    buffers = {s.source for part in trainer.parts for s in part.program.states if s.kind == "buffer"}
    tensors = {**trainer.tensors.parameters, **{n: t for n, t in trainer.tensors.others.items() if n in buffers}}
    return {n: t for n, t in tensors.items() if holding(trainer.parts, n)[:1] and _first_here(trainer, n)}


def _first_here(trainer: Trainer, name: str) -> bool:
    return holding(trainer.parts, name)[0] in trainer.tensors.stages


def _optimizer_names(trainer: Trainer, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.nn.Parameter]:
    if optimizer is None:
        return {}
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: p for name, p in trainer.tensors.parameters.items() if id(p) in known}


def _groups(trainer: Trainer, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = {id(p): name for name, p in trainer.tensors.parameters.items()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
        groups.append({
            "settings": {key: _plain(key, value) for key, value in settings.items()},
            "names": [names[id(p)] for p in group["params"] if id(p) in names],
        })  # fmt: skip
    return groups


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(key, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"the optimizer's setting {key!r} is a {type(value).__name__}, which a checkpoint cannot hold")


def _restore_settings(
    optimizer: torch.optim.Optimizer, saved: Sequence[OptimizerGroup], names: Mapping[str, torch.nn.Parameter]
) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise UsageError(
            f"the checkpoint's optimizer has {len(saved)} groups of parameters, this one "
            f"{len(optimizer.param_groups)}; build it as it was built when the checkpoint was written"
        )
    for group, was in zip(optimizer.param_groups, saved, strict=True):
        own = {name for name, p in names.items() if any(p is member for member in group["params"])}
        strange = sorted(own - set(was.names))
        if strange:
            raise UsageError(f"{strange[0]} is in another group of the checkpoint's optimizer; build it as it was then")
        for key, value in was.settings.items():
            group[key] = tuple(value) if isinstance(value, list) else value


def _state_device(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str) -> torch.device:
    """Say where an optimizer keeps a tensor of its state: beside the parameter, but most count steps on the host."""
    group = next(g for g in optimizer.param_groups if any(parameter is member for member in g["params"]))
    return HOST if key == "step" and not (group.get("capturable") or group.get("fused")) else parameter.device


def _index(
    trainer: Trainer, told: Sequence[Mapping[str, Any]], scheduler: Any, loader: Loader | None
) -> CheckpointIndex:
    groups: list[dict[str, Any]] = []
    for document in told:
        for place, group in enumerate(document["groups"]):
            if place == len(groups):
                groups.append({"settings": group["settings"], "names": []})
            groups[place]["names"] = sorted({*groups[place]["names"], *group["names"]})
    state = scheduler.state_dict() if scheduler is not None else None
    try:
        json.dumps(state)
    except (TypeError, ValueError):
        raise UsageError("the scheduler's state is more than numbers and text; save it yourself beside this") from None
    return CheckpointIndex(
        model=trainer.captured.graph.model, step=trainer.step, num_stages=trainer.placed.num_stages,
        num_replicas=len(trainer.grid.replicas), places=_merged(told, "places"),
        shapes={name: (dtype, shape) for name, (dtype, shape) in _merged(told, "shapes").items()},
        scalars=_merged(told, "scalars"), groups=[OptimizerGroup(**group) for group in groups], scheduler=state,
        loader=DataPosition(**loader.state()) if loader is not None else None,
        random=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(), files=_merged(told, "files"),
    )  # fmt: skip


def _merged(told: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {name: value for document in told for name, value in document[key].items()}


def _check_shared(trainer: Trainer, folder: Path, files: Sequence[Mapping[str, int]]) -> None:
    """Check that this process sees what each has written; raises `ModelError` naming the host that wrote elsewhere."""
    deadline = time.monotonic() + _SHOWS_S
    for rank, written in enumerate(files):
        for file in written:
            while not (folder / file).exists():
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"a checkpoint's folder must be one that all hosts share, but {_host(trainer, FEEDER)} does "
                        f"not see {folder / file}, which {_host(trainer, rank)} has written; use a shared folder"
                    )
                time.sleep(0.1)


def _host(trainer: Trainer, rank: int) -> str:
    """Name a process, with its host where that says more."""
    name = trainer.world.names[rank]
    host = trainer.world.hosts[rank] if rank < len(trainer.world.hosts) else name
    return name if host in name else f"{name} on {host}"


def _read_everywhere(trainer: Trainer, folder: Path) -> CheckpointIndex:
    """Read and check the index in every process, or raise in every process what is wrong with it in one."""
    index: CheckpointIndex | None = None
    failed = ""
    try:
        index = read_index(folder)
        check_whole(folder, index)
    except ModelError as error:
        failed = str(error)
    with trainer.explained():
        told = exchange(trainer.world.transport, {"failed": failed})
    failures = [(rank, document["failed"]) for rank, document in enumerate(told) if document["failed"]]
    if failures:
        rank, reason = failures[0]
        if rank != FEEDER:
            reason = (
                f"a checkpoint's folder must be one that all hosts share, but {_host(trainer, rank)} cannot read it as "
                f"{_host(trainer, FEEDER)} can: {reason}"
            )
        raise _everywhere(ModelError(reason))
    if index is None:
        raise ModelError(f"{folder} cannot be read; use an earlier checkpoint")
    return index


def _check_shapes(folder: Path, index: CheckpointIndex, wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        shape = index.shapes[name][1]
        if list(tensor.shape) != shape:
            raise UsageError(
                f"the checkpoint {folder} is of another model: {name.removeprefix('model/')} is {shape} in it and "
                f"{list(tensor.shape)} here; load it into the model that it was written from"
            )


def _check_names(trainer: Trainer, places: Mapping[str, str]) -> None:
    saved = {name.removeprefix("model/") for name in places if name.startswith("model/")}
    here = {s.source for part in trainer.parts for s in part.program.states if s.kind != "constant"}
    # earlier versions left out what no stage uses
    missing, more = sorted(here - saved), sorted(saved - here - set(trainer.captured.unused))
    if missing or more:
        parts = [f"it lacks {', '.join(missing[:3])}"] if missing else []
        parts += [f"it also has {', '.join(more[:3])}"] if more else []
        raise UsageError(
            f"the checkpoint is of another model than {trainer.captured.graph.model}: {' and '.join(parts)} "
            f"({len(missing) + len(more)} names differ); load it into the model that it was written from"
        )


def _target(trainer: Trainer, source: str) -> Tensor:
    tensors = trainer.tensors
    if source in tensors.parameters:
        return tensors.parameters[source].data
    return tensors.unused[source] if source in tensors.unused else tensors.others[source]


def _keys(places: Mapping[str, str], source: str) -> list[str]:
    return [
        name.split("/", 2)[1] for name in places if name.startswith("optimizer/") and name.split("/", 2)[2] == source
    ]


def _attempt(write: Callable[[], _Found]) -> tuple[str, _Found | None]:
    """Do something that the file system may refuse; returns the reason, and what came of it."""
    try:
        return "", write()
    except UsageError as error:
        return str(error), None
    # whatever a storage raises, the others wait to be told of it
    except Exception as error:
        return f"the checkpoint cannot be written: {reason_of(error)}; choose another folder or make room", None


def _agree(trainer: Trainer, work: Callable[[], _Found]) -> Any:
    """Do a step of writing in every process and return what the first one found; raises everywhere what failed."""
    failed, found = _attempt(work)
    with trainer.explained():
        told = exchange(trainer.world.transport, {"failed": failed, "found": found})
    _raise_first(told)
    return told[FEEDER]["found"]


def _raise_first(told: Sequence[Mapping[str, Any]]) -> None:
    failed = [document["failed"] for document in told if document["failed"]]
    if failed:
        raise _everywhere(ModelError(failed[0]))


def _everywhere(error: PenstockError) -> PenstockError:
    error.everywhere = True  # type: ignore[attr-defined]
    return error
