"""The folders of a checkpoint's stages: tensors in safetensors, written and read by torch.distributed.checkpoint."""

import contextlib
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.errors import ModelError
from penstock.files import flush
from penstock.tensors.devices import HOST
from penstock.train.checkpoint_index import INDEX, STAGE, CheckpointIndex

_STAGE_FOLDER = re.compile(STAGE)


def write_stages(folder: Path, own: Mapping[str, dict[str, Tensor]]) -> dict[str, int]:
    """Write the stages' folders, and return their files' bytes once all of it is on the disk.

    What fails leaves nothing behind: a full disk needs the room.
    """
    try:
        return _write(folder, own)
    except Exception:
        for stage in own:
            shutil.rmtree(folder / stage, ignore_errors=True)
        raise


def _write(folder: Path, own: Mapping[str, dict[str, Tensor]]) -> dict[str, int]:
    files: dict[str, int] = {}
    for stage, tensors in own.items():
        # what another run has left on a host that does not share the folder
        shutil.rmtree(folder / stage, ignore_errors=True)
        (folder / stage).mkdir(parents=True)
        with _in_one_process():
            save(
                {name: t.cpu().contiguous() for name, t in tensors.items()},
                storage_writer=HuggingFaceStorageWriter(path=str(folder / stage)), no_dist=True,
            )  # fmt: skip
        for file in sorted((folder / stage).iterdir()):
            flush(file)
            files[f"{stage}/{file.name}"] = file.stat().st_size
        flush(folder / stage)
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


def read_stages(folder: Path, places: Mapping[str, str], wanted: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, wherever they lie, with those of the checkpoint."""
    by_stage: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in wanted.items():
        by_stage[places[name]][name] = tensor
    for stage, given in by_stage.items():
        # files are read to the host
        tensors = {name: t if t.is_cpu else torch.empty_like(t, device=HOST) for name, t in given.items()}
        try:
            with _in_one_process():
                load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder / stage)), no_dist=True)
        # whatever a storage makes of a damaged file
        except Exception as error:
            raise damaged(folder, stage, reason_of(error)) from error
        for name, tensor in given.items():
            if tensor is not tensors[name]:
                tensor.copy_(tensors[name])


def check_whole(folder: Path, index: CheckpointIndex) -> None:
    """Check that every file is there at its full length and holds the tensors that the index names.

    Raises `ModelError` naming the stage's folder.
    """
    for stage in sorted({*index.places.values()}):
        try:
            _check_sizes(folder, stage, index)
            held = _held(folder / stage)
        except (OSError, ValueError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
            raise damaged(folder, stage, reason) from None
        for name, place in index.places.items():
            if place == stage and held.get(name) != index.shapes[name][1]:
                raise damaged(folder, stage, f"{name} is not there with the shape {index.shapes[name][1]}")


def damaged(folder: Path, stage: str, reason: str) -> ModelError:
    """Return the error for a checkpoint that cannot be read in one of its stages' folders."""
    return ModelError(f"the checkpoint {folder} is damaged in {stage}: {reason}; use an earlier one")


def _check_sizes(folder: Path, stage: str, index: CheckpointIndex) -> None:
    for file, num_bytes in (index.files or {}).items():
        if file.startswith(f"{stage}/") and (found := (folder / file).stat().st_size) != num_bytes:
            raise ValueError(f"{file} has {found} bytes of {num_bytes}")


def _held(stage: Path) -> Mapping[str, list[int]]:
    """Read what the files of a stage's folder hold, by their headers, which must fit the files' lengths."""
    held: dict[str, list[int]] = {}
    for file in sorted(stage.iterdir()):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                held |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return held


def stage_folders(folder: Path) -> list[Path]:
    """Return the folders of stages that lie in a checkpoint's folder, named by its index or not."""
    return [path for path in folder.iterdir() if _STAGE_FOLDER.fullmatch(path.name)] if folder.is_dir() else []


def next_suffix(folder: Path) -> str:
    """Return what to put behind the names of stages' folders so that none of them is there yet."""
    matches = [_STAGE_FOLDER.fullmatch(path.name) for path in stage_folders(folder)]
    used = [int(match[3] or 0) for match in matches if match is not None]
    return f".{max(used) + 1}" if used else ""


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """Let torch.distributed.checkpoint save or load in one process: without its warning, with the errors' own kinds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is one process is what we want
            yield
    except CheckpointException as error:  # no `Exception`, so that nobody's handler meets it
        raise next(iter(error.failures.values()))[0] from error


def reason_of(error: Exception) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
