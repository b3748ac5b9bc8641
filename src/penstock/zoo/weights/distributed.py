"""Checkpoints of torch.distributed.checkpoint, a folder each, read without running code from their files."""

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.text import one_line
from penstock.zoo.weights.weights import ByName, Shape

INDEX = ".metadata"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a tensor: its place in the tensor, and its bytes in a file."""

    starts: Sequence[int]
    sizes: Sequence[int]
    file: Path
    offset: int
    num_bytes: int


class _Record:
    """An object of an index, of any class: its fields, or the arguments that it is made of."""

    def __new__(cls, *args: object, **_options: object) -> "_Record":
        made = super().__new__(cls)
        made.__dict__["args"] = args
        return made

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"args": state})


class _Index(pickle.Unpickler):
    """Reads an index: only numbers, texts, containers, dtypes and records are made, and no class is imported."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of records for any class or function but dtypes and torch.Size."""
        if (module, name) == ("torch", "Size"):
            return tuple
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else type(name, (_Record,), {})


def read_distributed(folder: Path) -> tuple[dict[str, Any], dict[int, list[TensorPart]]]:
    """Return the entries of a checkpoint, nested as they were saved, and the parts of each tensor by its id.

    Tensors are on the meta device; other entries are None. Raises `ModelError` for a checkpoint that is not whole.
    """
    try:
        with (folder / INDEX).open("rb") as file:
            index = _Index(file).load()
        stored = {(key.fqn, getattr(key, "offset", None)): info for key, info in index.storage_data.items()}
        paths = index.planner_data if isinstance(index.planner_data, dict) else {}
        entries: dict[str, Any] = {}
        parts: dict[int, list[TensorPart]] = {}
        for name, entry in index.state_dict_metadata.items():
            tensor = None
            if hasattr(entry, "chunks"):
                tensor = torch.empty(tuple(entry.size), dtype=entry.properties.args[0], device="meta")
                parts[id(tensor)] = [_part(folder, name, chunk, stored) for chunk in entry.chunks]
                if sum(math.prod(part.sizes) for part in parts[id(tensor)]) != tensor.numel():
                    raise ModelError(f"{folder} does not have all parts of {name}; copy it again")
            _set(entries, paths.get(name, (name,)), tensor)
    except ModelError:
        raise
    except Exception as problem:  # a damaged pickle may raise anything
        raise ModelError(f"{folder / INDEX} cannot be read ({one_line(problem)}); copy {folder} again") from problem
    return entries, parts


def _part(folder: Path, name: str, chunk: Any, stored: Mapping[tuple[str, Any], Any]) -> TensorPart:
    found = stored.get((name, chunk.offsets))
    if found is None or Path(found.relative_path).name != found.relative_path:
        raise ModelError(f"{folder} has no file for a part of {name}; copy it again")
    if getattr(found, "transform_descriptors", None):
        raise ModelError(f"{folder} is compressed ({found.transform_descriptors[0]}); save it without extensions")
    file = folder / found.relative_path
    if not file.exists():
        raise ModelError(f"{file} is missing, which has a part of {name}; copy the files of all ranks into the folder")
    return TensorPart(chunk.offsets, chunk.sizes, file, found.offset, found.length)


def _set(entries: dict[str, Any], path: Sequence[object], value: object) -> None:
    """Set an entry in nested dicts."""
    *outer, last = map(str, path)
    for key in outer:
        entries = entries.setdefault(key, {})
    entries[last] = value


class StoredWeights(ByName[Tensor]):
    """Tensors of a distributed checkpoint, by the meta tensors and parts that `read_distributed` has returned."""

    def __init__(self, tensors: Mapping[str, Tensor], parts: Mapping[int, list[TensorPart]]) -> None:
        super().__init__(tensors)
        self._parts = parts

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape."""
        return tuple(self._find(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""
        return self._find(name).dtype

    def load(self, name: str) -> Tensor:
        """Read one tensor from its files; raises `ModelError` if a part is damaged."""
        like = self._find(name)
        whole = torch.empty(like.shape, dtype=like.dtype)
        for part in self._parts[id(like)]:
            place = whole
            for dimension, (start, size) in enumerate(zip(part.starts, part.sizes, strict=True)):
                place = place.narrow(dimension, start, size)
            try:
                with part.file.open("rb") as file:
                    file.seek(part.offset)
                    data = io.BytesIO(file.read(part.num_bytes))
                values = torch.load(data, map_location="cpu", weights_only=True)
                if values.shape != place.shape:
                    raise ValueError(f"expected {list(place.shape)}; got {list(values.shape)}")
                place.copy_(values)
            except Exception as problem:  # a damaged pickle may raise anything
                raise ModelError(
                    f"the part of {name} in {part.file} cannot be read ({one_line(problem, 80)}); copy it again"
                ) from problem
        return whole
