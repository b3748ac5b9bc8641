"""The folders of a checkpoint's stages: a safetensors file each, written and read tensor by tensor."""

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from penstock.errors import ModelError
from penstock.files import flush
from penstock.train.checkpoint_index import INDEX, STAGE, CheckpointIndex
from penstock.zoo.weights.weight_files import FileWeights, save_weights
from penstock.zoo.weights.weights import TensorWeights

_FILE = "model.safetensors"
_STAGE_FOLDER = re.compile(STAGE)


def write_stages(folder: Path, own: Mapping[str, dict[str, Tensor]]) -> dict[str, int]:
    """Write the stages' folders, and return their files' bytes once all of it is on the disk.

    What fails leaves nothing behind: a full disk needs the room.
    """
    try:
        return _write(folder, own)
    except Exception as error:
        for stage in own:
            shutil.rmtree(folder / stage, ignore_errors=True)
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None  # the name of one of a checkpoint's files says nothing more
        raise


def _write(folder: Path, own: Mapping[str, dict[str, Tensor]]) -> dict[str, int]:
    files: dict[str, int] = {}
    for stage, tensors in own.items():
        # what another run has left on a host that does not share the folder
        shutil.rmtree(folder / stage, ignore_errors=True)
        (folder / stage).mkdir(parents=True)
        save_weights(TensorWeights(tensors), folder / stage / _FILE)
        files[f"{stage}/{_FILE}"] = (folder / stage / _FILE).stat().st_size
    if own:
        flush(folder)
        flush(folder.parent)
    return files


def drop_leftovers(folder: Path, kept: set[str]) -> None:
    """Remove what the index does not name: an earlier checkpoint's stages, and what a process that died has left."""
    for path in stage_folders(folder):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{INDEX}.*"):
        path.unlink(missing_ok=True)


class StageFiles:
    """The tensors of a checkpoint, each read from its stage's folder when it is asked for.

    `places` tells the stage's folder of each tensor. Raises `ModelError` for a folder that is damaged.
    """

    def __init__(self, folder: Path, places: Mapping[str, str]) -> None:
        self._folder, self._places = folder, places
        self._stages: dict[str, FileWeights] = {}

    def shape(self, name: str) -> list[int] | None:
        """Return the shape of a tensor in its file; None where it is not there."""
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
    """Check that every file is there at its full length and holds the tensors that the index names.

    Raises `ModelError` naming the stage's folder.
    """
    for stage in sorted({*index.places.values()}):
        try:
            _check_sizes(folder, stage, index)
        except (OSError, ValueError) as error:
            raise damaged(folder, stage, reason_of(error)) from None
    files = StageFiles(folder, index.places)
    for name, stage in sorted(index.places.items(), key=lambda item: item[1]):
        if files.shape(name) != index.shapes[name][1]:
            raise damaged(folder, stage, f"{name} is not there with the shape {index.shapes[name][1]}")


def damaged(folder: Path, stage: str, reason: str) -> ModelError:
    """Return the error for a checkpoint that cannot be read in one of its stages' folders."""
    return ModelError(f"the checkpoint {folder} is damaged in {stage}: {reason}; use an earlier one")


def _check_sizes(folder: Path, stage: str, index: CheckpointIndex) -> None:
    for file, num_bytes in (index.files or {}).items():
        if file.startswith(f"{stage}/") and (found := (folder / file).stat().st_size) != num_bytes:
            raise ValueError(f"{file} has {found} bytes of {num_bytes}")


def stage_folders(folder: Path) -> list[Path]:
    """Return the folders of stages that lie in a checkpoint's folder, named by its index or not."""
    return [path for path in folder.iterdir() if _STAGE_FOLDER.fullmatch(path.name)] if folder.is_dir() else []


def next_suffix(folder: Path) -> str:
    """Return what to add to the names of stages' folders so that none of them is there yet."""
    matches = [_STAGE_FOLDER.fullmatch(path.name) for path in stage_folders(folder)]
    used = [int(match[3] or 0) for match in matches if match is not None]
    return f".{max(used) + 1}" if used else ""


def reason_of(error: Exception) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
