"""What a checkpoint's folder must hold to be whole, read strictly: nothing in it is taken at its word.

    folder/
        checkpoint.json            the index: step, settings, which stage's folder holds each tensor
        stage-0/  stage-1.2/       tensors in safetensors; after the dot how often the folder was written before
        unused/                    parameters that no stage uses, where there are any

The index takes its place in one instant, after everything that it names is on the disk, and names folders that
nothing is written to any more. So a folder holds the earlier checkpoint or the later one at every moment.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from penstock.errors import ModelError
from penstock.files import written_whole
from penstock.graph.encoding import DTYPES

INDEX = "checkpoint.json"
STAGE = r"(stage-\d{1,6}|unused)(\.(\d{1,9}))?"

Count = Annotated[int, Meta(ge=1)]
Place = Annotated[int, Meta(ge=0, le=2**62)]
StageFolder = Annotated[str, Meta(pattern=rf"\A{STAGE}\Z")]
StageFile = Annotated[str, Meta(pattern=rf"\A{STAGE}/[A-Za-z0-9_][A-Za-z0-9._-]*\Z")]
TensorName = Annotated[str, Meta(pattern=r"\A(model/.+|optimizer/[^/]+/.+)\Z")]


class OptimizerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one of an optimizer's groups, and the names of its parameters."""

    settings: dict[str, Any]
    names: list[str]


class DataPosition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place in the data, to be continued from."""

    epoch: Place
    position: Place


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `checkpoint.json` holds.

    `places` tells the stage's folder of each tensor and `shapes` its dtype and shape; `scalars` are an optimizer's
    values that are no tensors, by parameter. `files` are the bytes of each file of the stages' folders; earlier
    checkpoints do not say them.
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
    scheduler: dict[str, Any] | None
    loader: DataPosition | None
    random: str
    files: dict[StageFile, Place] | None = None

    def random_state(self) -> torch.Tensor:
        """Return the random state; raises `ValueError` for one that is none."""
        state = torch.frombuffer(bytearray(base64.b64decode(self.random, validate=True)), dtype=torch.uint8)
        expected = torch.get_rng_state().numel()
        if state.numel() != expected:
            raise ValueError(f"a random state has {expected} bytes, not {state.numel()}")
        return state


def write_index(folder: Path, index: CheckpointIndex) -> None:
    """Put an index in the place of an earlier one, whole or not at all; raises `OSError` where it cannot be."""
    text = json.dumps(msgspec.to_builtins(index), indent=1)
    with written_whole(folder / INDEX) as file:
        file.write(text.encode())


def read_index(folder: Path) -> CheckpointIndex:
    """Read the index of a checkpoint and check everything that it says, but for the tensors' own files.

    Raises `ModelError` in one line.
    """
    path = folder / INDEX
    try:
        # not msgspec's reader: settings may hold infinities, which JSON has no word for and Python's has
        index = msgspec.convert(json.loads(path.read_bytes()), CheckpointIndex)
        index.random_state()
        _check_names(index)
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no whole checkpoint: it has no {INDEX}; check the path") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); use an earlier checkpoint") from None
    # also what is no base64, no UTF-8 or nested without end
    except (ValueError, binascii.Error, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(f"{path} is no checkpoint that this version reads ({reason}); use an earlier one") from None
    return index


def _check_names(index: CheckpointIndex) -> None:
    """Raise `ValueError` where parts of an index contradict each other."""
    if index.places.keys() != index.shapes.keys():
        name = min(index.places.keys() ^ index.shapes.keys())
        raise ValueError(f"{name} must have a place and a shape")
    for name, (dtype, _) in index.shapes.items():
        if dtype not in DTYPES:
            raise ValueError(f"{name} is {dtype!r}, which no tensor is")
    for group in index.groups:
        if "params" in group.settings:
            raise ValueError("a group's parameters are no setting of it")
