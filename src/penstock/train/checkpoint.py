"""Checkpoints that continue with another number of stages or replicas: everything by the model's own names.

    folder/
        checkpoint.json        step, random state, settings of optimizer and scheduler, where each tensor is
        stage-0/  stage-1/     tensors in safetensors, written and read by torch.distributed.checkpoint

Nothing in a checkpoint is pickled. A tensor that several stages have is saved by the first of them.
"""

import base64
import json
import shutil
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.engine.devices import HOST
from penstock.engine.reduce import exchange
from penstock.engine.world import FEEDER
from penstock.errors import ModelError, PenstockError, UsageError
from penstock.graph.encoding import DTYPES
from penstock.train.loader import Loader
from penstock.train.tensors import holding
from penstock.train.trainer import Trainer

FORMAT, VERSION = "penstock-checkpoint", 1
_INDEX = "checkpoint.json"


def save_checkpoint(
    trainer: Trainer, folder: Path, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None,
    loader: Loader | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint; every process calls this. The index is written last, so a torn checkpoint has none.

    Raises `ModelError` on every process where it cannot be written, `UsageError` for a setting that JSON
    cannot hold.
    """
    names = _optimizer_names(trainer, optimizer)
    own: dict[str, dict[str, Tensor]] = defaultdict(dict)
    scalars: dict[str, dict[str, Any]] = {}
    for source, tensor in _saved_here(trainer).items():
        stage = f"stage-{holding(trainer.parts, source)[0]}"
        own[stage][f"model/{source}"] = tensor.detach()
        if optimizer is not None and source in names:
            state = optimizer.state.get(names[source], {})
            own[stage] |= {f"optimizer/{key}/{source}": v for key, v in state.items() if isinstance(v, Tensor)}
            scalars[source] = {key: v for key, v in state.items() if not isinstance(v, Tensor)}
    failed = _attempt(lambda: _write(folder, own)) if own else ""
    places = {name: stage for stage, tensors in own.items() for name in tensors}
    shapes = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for tensors in own.values() for name, tensor in tensors.items()
    }  # fmt: skip
    groups = _groups(trainer, optimizer) if optimizer is not None else []
    with trainer.explained():
        told = exchange(
            trainer.world.transport,
            {"failed": failed, "places": places, "shapes": shapes, "scalars": scalars, "groups": groups},
        )
    _raise_first(told)
    message = ""
    if trainer.world.rank == FEEDER:
        document = _index(trainer, told, scheduler, loader)
        message = _attempt(lambda: (folder / _INDEX).write_text(json.dumps(document, indent=1), encoding="utf-8"))
    with trainer.explained():
        told = exchange(trainer.world.transport, {"failed": message})
    _raise_first(told)


def load_checkpoint(
    trainer: Trainer, folder: Path, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None,
    loader: Loader | None = None,
) -> None:  # fmt: skip
    """Continue from a checkpoint, with any number of stages and replicas; every process calls this.

    Raises `ModelError` for a folder that holds no checkpoint or a damaged one, `UsageError` for one of
    another model, naming what differs.
    """
    index = _read_index(folder)
    places: Mapping[str, str] = index["places"]
    _check_names(trainer, places)
    wanted: dict[str, Tensor] = {}
    sources = [*trainer.tensors.parameters, *trainer.tensors.others]
    for source in sources:
        if f"model/{source}" in places:
            wanted[f"model/{source}"] = _target(trainer, source)
    if optimizer is not None:
        _restore_settings(optimizer, index["groups"], _optimizer_names(trainer, optimizer))
        for source, parameter in _optimizer_names(trainer, optimizer).items():
            state = optimizer.state[parameter]
            state.update(index["scalars"].get(source, {}))
            for key in _keys(places, source):
                dtype, shape = index["shapes"][f"optimizer/{key}/{source}"]
                device = _state_device(optimizer, parameter, key)
                state[key] = wanted[f"optimizer/{key}/{source}"] = torch.zeros(
                    shape, dtype=DTYPES[dtype], device=device
                )
    _read(folder, places, wanted)
    trainer.step = int(index["step"])
    if scheduler is not None:
        scheduler.load_state_dict(index["scheduler"])
    if loader is not None and index["loader"] is not None:
        loader.resume(index["loader"])
    random = bytearray(base64.b64decode(index["random"]))
    torch.set_rng_state(torch.frombuffer(random, dtype=torch.uint8))


def _saved_here(trainer: Trainer) -> dict[str, Tensor]:
    """Give the tensors that this process saves: of the first replica, each by the first stage that has it."""
    if trainer.replica_index:
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
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]], names: Mapping[str, torch.nn.Parameter]
) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise UsageError(
            f"the checkpoint's optimizer has {len(saved)} groups of parameters, this one "
            f"{len(optimizer.param_groups)}; build it as it was built when the checkpoint was written"
        )
    for group, was in zip(optimizer.param_groups, saved, strict=True):
        own = {name for name, p in names.items() if any(p is member for member in group["params"])}
        strange = sorted(own - set(was["names"]))
        if strange:
            raise UsageError(f"{strange[0]} is in another group of the checkpoint's optimizer; build it as it was then")
        for key, value in was["settings"].items():
            group[key] = tuple(value) if isinstance(value, list) else value


def _state_device(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str) -> torch.device:
    """Say where an optimizer keeps a tensor of its state: beside the parameter, but most count steps on the host."""
    group = next(g for g in optimizer.param_groups if any(parameter is member for member in g["params"]))
    return HOST if key == "step" and not (group.get("capturable") or group.get("fused")) else parameter.device


def _index(
    trainer: Trainer, told: Sequence[Mapping[str, Any]], scheduler: Any, loader: Loader | None
) -> dict[str, Any]:
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
    return {
        "format": FORMAT, "version": VERSION, "model": trainer.captured.graph.model, "step": trainer.step,
        "num_stages": trainer.num_stages, "num_replicas": len(trainer.grid.replicas),
        "places": {name: stage for document in told for name, stage in document["places"].items()},
        "shapes": {name: shape for document in told for name, shape in document["shapes"].items()},
        "scalars": {name: values for document in told for name, values in document["scalars"].items()},
        "groups": groups, "scheduler": state, "loader": loader.state() if loader is not None else None,
        "random": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }  # fmt: skip


def _write(folder: Path, own: Mapping[str, dict[str, Tensor]]) -> None:
    for stage, tensors in own.items():
        shutil.rmtree(folder / stage, ignore_errors=True)
        (folder / stage).mkdir(parents=True)
        (folder / _INDEX).unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it saves in one process is what we want
            save(
                {name: t.cpu().contiguous() for name, t in tensors.items()},
                storage_writer=HuggingFaceStorageWriter(path=str(folder / stage)), no_dist=True,
            )  # fmt: skip


def _read(folder: Path, places: Mapping[str, str], wanted: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, wherever they lie, with those of the checkpoint."""
    by_stage: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in wanted.items():
        by_stage[places[name]][name] = tensor
    for stage, given in by_stage.items():
        # files are read to the host
        tensors = {name: t if t.is_cpu else torch.empty_like(t, device=HOST) for name, t in given.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder / stage)), no_dist=True)
        # torch.distributed.checkpoint wraps whatever a storage raises
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"the checkpoint {folder} is damaged in {stage}: {reason}; use an earlier one") from error
        for name, tensor in given.items():
            if tensor is not tensors[name]:
                tensor.copy_(tensors[name])


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no whole checkpoint: it has no {_INDEX}; check the path") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / _INDEX} cannot be read ({error}); use an earlier checkpoint") from None
    if index.get("format") != FORMAT or index.get("version") != VERSION:
        raise ModelError(f"{folder / _INDEX} is no checkpoint that this version reads")
    strange = [stage for stage in index["places"].values() if Path(stage).name != stage]
    if strange:
        raise ModelError(f"{folder / _INDEX} names the folder {strange[0]!r}; a stage's folder lies in the checkpoint")
    return index


def _check_names(trainer: Trainer, places: Mapping[str, str]) -> None:
    saved = {name.removeprefix("model/") for name in places if name.startswith("model/")}
    here = {s.source for part in trainer.parts for s in part.program.states if s.kind != "constant"}
    missing, more = sorted(here - saved), sorted(saved - here)
    if missing or more:
        parts = [f"it lacks {', '.join(missing[:3])}"] if missing else []
        parts += [f"it also has {', '.join(more[:3])}"] if more else []
        raise UsageError(
            f"the checkpoint is of another model than {trainer.captured.graph.model}: {' and '.join(parts)} "
            f"({len(missing) + len(more)} names differ); load it into the model that it was written from"
        )


def _target(trainer: Trainer, source: str) -> Tensor:
    tensors = trainer.tensors
    return tensors.parameters[source].data if source in tensors.parameters else tensors.others[source]


def _keys(places: Mapping[str, str], source: str) -> list[str]:
    return [
        name.split("/", 2)[1] for name in places if name.startswith("optimizer/") and name.split("/", 2)[2] == source
    ]


def _attempt(write: Any) -> str:
    """Do something that the file system may refuse; gives the reason."""
    try:
        write()
    except UsageError:
        raise
    # torch.distributed.checkpoint wraps whatever a storage raises
    except Exception as error:
        return (
            f"the checkpoint cannot be written: {(str(error).splitlines() or [repr(error)])[0]}; choose another folder"
        )
    return ""


def _raise_first(told: Sequence[Mapping[str, Any]]) -> None:
    failed = [document["failed"] for document in told if document["failed"]]
    if failed:
        error: PenstockError = ModelError(failed[0])
        error.everywhere = True  # type: ignore[attr-defined]
        raise error
