"""Format of a checkpoint's folder, and its strict validation: no content is trusted.

    folder/
        checkpoint.json            the index: step, settings, which stage folder holds each tensor
        stage-0/  stage-1.2/       tensors in safetensors; the number after the dot distinguishes saves
        unused/                    parameters, and state of frozen layers, that no stage uses, if any

The index is replaced atomically, once all files that it names are on the disk, and never names a folder that is still
being written. So at every moment the folder holds either the earlier or the later checkpoint.
"""

import base64
import binascii
import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from torch import Tensor

from penstock.errors import ModelError
from penstock.files import flush, written_whole
from penstock.graph.ops import DTYPES
from penstock.train.plain_values import decode
from penstock.zoo.weights.weight_files import FileWeights, save_weights
from penstock.zoo.weights.weights import TensorWeights

INDEX = "checkpoint.json"
STAGE = r"(stage-\d{1,6}|unused)(\.(\d{1,9}))?"

Count = Annotated[int, Meta(ge=1)]
Place = Annotated[int, Meta(ge=0, le=2**62)]
StageFolder = Annotated[str, Meta(pattern=rf"\A{STAGE}\Z")]
StageFile = Annotated[str, Meta(pattern=rf"\A{STAGE}/[A-Za-z0-9_][A-Za-z0-9._-]*\Z")]
TensorName = Annotated[str, Meta(pattern=r"\A(model/.+|optimizer/[^/]+/.+)\Z")]


class OptimizerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an optimizer's parameter group, the names of its parameters, and its index among a rank's groups.

    `schedules` has the group's entries in lists of schedulers.
    """

    settings: dict[str, Any]
    names: list[str]
    place: Place
    schedules: dict[str, Any]


class DataPosition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A position in the data to continue from."""

    epoch: Place
    position: Place


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `checkpoint.json`.

    `places` has the stage folder of each tensor and `shapes` its dtype and shape; `scalars` are an optimizer's
    non-tensor values, by parameter. `loaders` are the positions in the data of all loaders in the order of their
    creation, and `trained` is the index of the one that was trained on, None without loaders. `files` is the size in
    bytes of each file. `save` is the name of the save, repeated in the header of each file, so that two runs that write
    to one folder never mistake each other's files for their own. `elastic` is the state of an elastic training run.
    """

    format: Literal["penstock-checkpoint"] = "penstock-checkpoint"
    version: Literal[1] = 1
    model: str
    step: Place
    num_stages: Count
    num_replicas: Count
    places: dict[TensorName, StageFolder]
    shapes: dict[TensorName, tuple[str, list[Place]]]
    scalars: dict[str, dict[str, Any]]
    groups: list[OptimizerGroup]
    schedulers: list[dict[str, Any]]
    loaders: list[DataPosition]
    trained: Place | None
    random: str
    files: dict[StageFile, Place]
    elastic: dict[str, Any] | None
    save: str

    def random_state(self) -> torch.Tensor:
        """Return the random state; raises `ValueError` if it is not valid."""
        state = torch.frombuffer(bytearray(base64.b64decode(self.random, validate=True)), dtype=torch.uint8)
        expected = torch.get_rng_state().numel()
        if state.numel() != expected:
            raise ValueError(f"a random state must have {expected} bytes; got {state.numel()}")
        return state


def write_index(folder: Path, index: CheckpointIndex) -> None:
    """Replace an earlier index atomically; raises `OSError` on failure."""
    text = json.dumps(msgspec.to_builtins(index), indent=1)
    with written_whole(folder / INDEX) as file:
        file.write(text.encode())


def read_index(folder: Path) -> CheckpointIndex:
    """Read and validate the index of a checkpoint, except for the tensors' files.

    Raises `ModelError` in one line.
    """
    path = folder / INDEX
    try:
        # not msgspec's decoder: settings may hold infinities, which only Python's decoder accepts
        index = msgspec.convert(json.loads(path.read_bytes()), CheckpointIndex)
        index.random_state()
        decode([index.schedulers, index.scalars, [[each.settings, each.schedules] for each in index.groups]])
        _check_names(index)
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no complete checkpoint: {INDEX} not found; check the path") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); use an earlier checkpoint") from None
    # including invalid base64 or UTF-8, and unlimited nesting
    except (ValueError, LookupError, TypeError, RuntimeError, binascii.Error, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(f"{path} is not a checkpoint that this version can read ({reason}); use another one") from None
    return index


def _check_names(index: CheckpointIndex) -> None:
    """Raise `ValueError` if an index is inconsistent."""
    if index.places.keys() != index.shapes.keys():
        name = min(index.places.keys() ^ index.shapes.keys())
        raise ValueError(f"{name} must have a folder and a shape")
    for name, (dtype, _) in index.shapes.items():
        if dtype not in DTYPES:
            raise ValueError(f"the dtype of {name} must be known; got {dtype!r}")
    for group in index.groups:
        if "params" in group.settings:
            raise ValueError("a group's settings must not contain 'params'")
    if index.trained is not None and index.trained >= len(index.loaders):
        raise ValueError(f"trained must be the index of one of {len(index.loaders)} loaders; got {index.trained}")


_FILE = "model.safetensors"
_SAVE = "penstock.save"  # key in a file's header
_STAGE_FOLDER = re.compile(STAGE)


def new_save() -> str:
    """Return a unique name for a save."""
    return secrets.token_hex(16)


def write_stages(folder: Path, own: Mapping[str, dict[str, Tensor]], save: str) -> dict[str, int]:
    """Write the stages' folders for a save, and return the size of each file once all are on the disk.

    If a write fails, the files are removed to free space.
    """
    try:
        return _write(folder, own, save)
    except Exception as error:
        for stage in own:
            shutil.rmtree(folder / stage, ignore_errors=True)
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None  # the error of the system alone; the file's path would add nothing
        raise


def _write(folder: Path, own: Mapping[str, dict[str, Tensor]], save: str) -> dict[str, int]:
    files: dict[str, int] = {}
    for stage, tensors in own.items():
        # rank 0 chose an unused name, but a host that does not share the folder may have an old one of that name
        shutil.rmtree(folder / stage, ignore_errors=True)
        (folder / stage).mkdir(parents=True)
        save_weights(TensorWeights(tensors), folder / stage / _FILE, metadata={_SAVE: save})
        files[f"{stage}/{_FILE}"] = (folder / stage / _FILE).stat().st_size
    if own:
        flush(folder)
        flush(folder.parent)
    return files


def drop_leftovers(folder: Path, kept: set[str]) -> None:
    """Remove files that the index does not name: an earlier checkpoint's stages, and leftovers of failed processes."""
    for path in stage_folders(folder):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{INDEX}.*"):
        path.unlink(missing_ok=True)


class StageFiles:
    """Lazy access to the tensors of a checkpoint in its stages' folders.

    `places` has the stage folder of each tensor. Raises `ModelError` for a damaged folder.
    """

    def __init__(self, folder: Path, places: Mapping[str, str]) -> None:
        self._folder, self._places = folder, places
        self._stages: dict[str, FileWeights] = {}

    def save(self, name: str) -> str | None:
        """Return the name of the save that wrote a tensor's file; None if it names none."""
        with self._explained(name):
            return self._stage(name).metadata.get(_SAVE)

    def shape(self, name: str) -> list[int] | None:
        """Return the shape of a tensor in its file; None if it is missing."""
        with self._explained(name):
            stage = self._stage(name)
            return list(stage.shape(name)) if name in stage.names() else None

    def load(self, name: str) -> Tensor:
        """Read one tensor to the host."""
        with self._explained(name):
            return self._stage(name).load(name)

    def _stage(self, name: str) -> FileWeights:
        stage = self._places[name]
        if stage not in self._stages:
            self._stages[stage] = FileWeights(self._folder / stage)
        return self._stages[stage]

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ModelError, OSError, SafetensorError) as error:
            raise damaged(self._folder, self._places[name], reason_of(error)) from error


def check_whole(folder: Path, index: CheckpointIndex) -> None:
    """Check that every file has its full length, belongs to this save, and holds the tensors of the index.

    Raises `ModelError` naming the stage folder.
    """
    for stage in sorted({*index.places.values()}):
        try:
            _check_sizes(folder, stage, index)
        except (OSError, ValueError) as error:
            raise damaged(folder, stage, reason_of(error)) from None
    files = StageFiles(folder, index.places)
    for name, stage in sorted(index.places.items(), key=lambda item: item[1]):
        if files.shape(name) != index.shapes[name][1]:
            raise damaged(folder, stage, f"{name} not found with the shape {index.shapes[name][1]}")
    for stage, name in {stage: name for name, stage in index.places.items()}.items():
        if files.save(name) != index.save:
            raise damaged(
                folder, stage, "it belongs to another save; probably two runs wrote to one folder at the same time"
            )


def damaged(folder: Path, stage: str, reason: str) -> ModelError:
    """Return the error for a checkpoint with an unreadable stage folder."""
    return ModelError(f"the checkpoint {folder} is damaged in {stage}: {reason}; use an earlier checkpoint")


def _check_sizes(folder: Path, stage: str, index: CheckpointIndex) -> None:
    for file, num_bytes in index.files.items():
        if file.startswith(f"{stage}/") and (found := (folder / file).stat().st_size) != num_bytes:
            raise ValueError(f"{file} has {found} bytes of {num_bytes}")


def stage_folders(folder: Path) -> list[Path]:
    """Return all stage folders in a checkpoint's folder, including those that the index does not name."""
    return [path for path in folder.iterdir() if _STAGE_FOLDER.fullmatch(path.name)] if folder.is_dir() else []


def next_suffix(folder: Path) -> str:
    """Return an unused suffix for the names of stage folders."""
    matches = [_STAGE_FOLDER.fullmatch(path.name) for path in stage_folders(folder)]
    used = [int(match[3] or 0) for match in matches if match is not None]
    return f".{max(used) + 1}" if used else ""


def reason_of(error: Exception) -> str:
    """Return an error's message in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
