"""Convert a checkpoint to safetensors without running code from its files: a pickled one, or a folder.

Folders are those of torch.distributed.checkpoint.
"""

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.text import nearest, one_line
from penstock.zoo.weights.pickled import Inert, read_pickled
from penstock.zoo.weights.weight_files import save_weights, shards_of_index, write_classes
from penstock.zoo.weights.weights import ByName, Shape, TensorWeights

# keys under which training scripts save the weights, in search order: averaged weights first, because the scripts' own
# evaluation uses those
_NESTINGS = (
    "model_ema", "state_dict_ema", "ema", "ema_state_dict", "model", "state_dict", "module", "model_state_dict",
    "model_state", "net", "network", "student", "app",
)  # fmt: skip
_PREFIXES = ("module.", "_orig_mod.")
_AVERAGED = "n_averaged"  # the counter of torch's AveragedModel, next to its module
_INDEX_SUFFIX = ".bin.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion, with the entries of the checkpoint that are not tensors.

    `key` is the entry that has the weights, and `others` are further ones.
    """

    num_tensors: int
    num_bytes: int
    dropped: tuple[str, ...]
    key: str = ""
    others: tuple[str, ...] = field(default_factory=tuple)


def convert_checkpoint(source: Path, target: Path, key: str | None = None) -> Converted:
    """Write the tensors of a checkpoint as one safetensors file.

    A checkpoint is a file of torch.save, an index of .bin shards, or a folder of torch.distributed.checkpoint.

    The weights are under `key`, or else under the first of `model_ema`, `state_dict_ema`, `ema`, `model`, `state_dict`,
    `module`, `model_state_dict` and others that exists, also nested. The prefixes `module.`, `_orig_mod.` and, below a
    key, `model.` are removed if all names have them. Shapes and dtypes stay. A tensor with several names is written
    under each name. Class names (`class_to_idx`, `classes`) go into the metadata. The target is written atomically.

    >>> convert_checkpoint(Path("deit.pth"), Path("deit.safetensors")).num_tensors  # doctest: +SKIP
    152

    Raises `ModelError` if the source is missing or damaged or contains no tensors, and if the target cannot be written
    or is the source.
    """
    if source.suffix == ".safetensors":
        raise ModelError(f"{source} is safetensors already; give it with --weights")
    if target.suffix != ".safetensors":
        raise ModelError(f"the target must be named .safetensors; got {target}; choose another --output")
    if target.exists() and source.exists() and target.samefile(source):
        raise ModelError(f"{target} is {source} itself, which would be lost; choose another --output")
    files = shards_of_index(source) if source.name.endswith(_INDEX_SUFFIX) else [source]
    state: dict[str, Tensor] = {}
    parts: dict[int, list[_TensorPart]] | None = None
    whole: Mapping[Any, object]
    for file in files:
        if (file / _INDEX).is_file():
            whole, parts = _read_distributed(file)
        else:
            whole = _mapping(read_pickled(file), file)
        path, found = _unwrap(whole, file, key)
        tensors, dropped = _tensors(found, file, nested=bool(path))
        state |= tensors
    others = [name for name in _NESTINGS if path and name != path[0] and _is_weights(whole.get(name))]
    weights = TensorWeights(state) if parts is None else _StoredWeights(state, parts)
    num_bytes = save_weights(weights, target, metadata=write_classes(_class_names(whole)))
    return Converted(
        num_tensors=len(state), num_bytes=num_bytes, dropped=dropped, key=".".join(path), others=tuple(others)
    )


def _mapping(value: object, source: Path) -> Mapping[Any, object]:
    if isinstance(value, Inert):
        raise ModelError(
            f"{source} holds a pickled object, not tensors by name; where it was made, save model.state_dict() instead "
            "and convert that"
        )
    if not isinstance(value, Mapping):
        raise ModelError(f"{source} holds a {type(value).__name__}, not tensors by name; save a state_dict")
    return value


def _unwrap(value: Mapping[Any, object], source: Path, chosen: str | None) -> tuple[list[str], Mapping[Any, object]]:
    """Follow the usual nesting to the mapping that contains the tensors; return the keys on the way, too."""
    if chosen is not None and not _is_weights(value.get(chosen)):
        known = [str(key) for key, item in value.items() if _is_weights(item)]
        raise ModelError(
            f"{source} has no tensors under {chosen!r}{nearest(chosen, known)}; entries with tensors: "
            f"{', '.join(known) or 'none'}"
        )
    for key in _NESTINGS if chosen is None else [chosen]:
        inner = value.get(key)
        if isinstance(inner, Mapping) and _is_weights(inner):
            path, found = _unwrap(inner, source, None)
            return [key, *path], found
        if chosen is None and isinstance(inner, Inert):
            raise ModelError(
                f"{source} holds a pickled object under {key!r}, not tensors by name; where it was made, save its "
                "state_dict() instead, or give another entry with --key"
            )
    return [], value


def _is_weights(value: object) -> bool:
    """Return True for a mapping with tensors, also nested."""
    if not isinstance(value, Mapping):
        return False
    if any(isinstance(item, Tensor) for item in value.values()):
        return True
    return any(isinstance(value.get(key), Mapping) for key in _NESTINGS)


def _class_names(checkpoint: Mapping[Any, object]) -> list[str] | None:
    """Return the class names that a training script saved with its weights, in the order of the outputs, or None."""
    numbers = checkpoint.get("class_to_idx")
    if isinstance(numbers, Mapping) and sorted(numbers.values(), key=str) == sorted(range(len(numbers)), key=str):
        return [str(name) for name in sorted(numbers, key=lambda name: int(numbers[name]))]
    for key in ("classes", "class_names", "label_names"):
        names = checkpoint.get(key)
        if isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names):
            return list(names)
    return None


def _tensors(state: Mapping[Any, object], source: Path, *, nested: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors by clean name, and the names of everything else."""
    tensors = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ModelError(f"{source} holds no tensors; its entries are {', '.join(map(str, list(state)[:5]))}")
    sparse = [key for key, value in tensors.items() if value.layout != torch.strided or value.is_quantized]
    if sparse:
        raise ModelError(f"{source} holds {sparse[0]} as a sparse or quantized tensor; save it as a dense tensor")
    dropped = [str(key) for key, value in state.items() if not isinstance(value, Tensor)]
    if _AVERAGED in tensors and all(key.startswith("module.") for key in tensors if key != _AVERAGED):
        del tensors[_AVERAGED]
        dropped.append(_AVERAGED)
    prefixes = (*_PREFIXES, "model.") if nested else _PREFIXES  # a model of transformers has names in `model.`, too
    while prefix := next((one for one in prefixes if tensors and all(key.startswith(one) for key in tensors)), None):
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors, tuple(dropped)


_INDEX = ".metadata"


@dataclass(frozen=True, slots=True)
class _TensorPart:
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


def _read_distributed(folder: Path) -> tuple[dict[str, Any], dict[int, list[_TensorPart]]]:
    """Return the entries of a checkpoint, nested as they were saved, and the parts of each tensor by its id.

    Tensors are on the meta device; other entries are None. Raises `ModelError` for a checkpoint that is not whole.
    """
    try:
        with (folder / _INDEX).open("rb") as file:
            index = _Index(file).load()
        stored = {(key.fqn, getattr(key, "offset", None)): info for key, info in index.storage_data.items()}
        paths = index.planner_data if isinstance(index.planner_data, dict) else {}
        entries: dict[str, Any] = {}
        parts: dict[int, list[_TensorPart]] = {}
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
        raise ModelError(f"{folder / _INDEX} cannot be read ({one_line(problem)}); copy {folder} again") from problem
    return entries, parts


def _part(folder: Path, name: str, chunk: Any, stored: Mapping[tuple[str, Any], Any]) -> _TensorPart:
    found = stored.get((name, chunk.offsets))
    if found is None or Path(found.relative_path).name != found.relative_path:
        raise ModelError(f"{folder} has no file for a part of {name}; copy it again")
    if getattr(found, "transform_descriptors", None):
        raise ModelError(f"{folder} is compressed ({found.transform_descriptors[0]}); save it without extensions")
    file = folder / found.relative_path
    if not file.exists():
        raise ModelError(f"{file} is missing, which has a part of {name}; copy the files of all ranks into the folder")
    return _TensorPart(chunk.offsets, chunk.sizes, file, found.offset, found.length)


def _set(entries: dict[str, Any], path: Sequence[object], value: object) -> None:
    """Set an entry in nested dicts."""
    *outer, last = map(str, path)
    for key in outer:
        entries = entries.setdefault(key, {})
    entries[last] = value


class _StoredWeights(ByName[Tensor]):
    """Tensors of a distributed checkpoint, by the meta tensors and parts that `_read_distributed` has returned."""

    def __init__(self, tensors: Mapping[str, Tensor], parts: Mapping[int, list[_TensorPart]]) -> None:
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
