"""Convert a pickled checkpoint to safetensors without running code from the file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.text import nearest
from penstock.zoo.weights.distributed import INDEX, StoredWeights, TensorPart, read_distributed
from penstock.zoo.weights.pickled import Inert, read_pickled
from penstock.zoo.weights.weight_files import save_weights, shards_of_index, write_classes
from penstock.zoo.weights.weights import TensorWeights

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
    parts: dict[int, list[TensorPart]] | None = None
    whole: Mapping[Any, object]
    for file in files:
        if (file / INDEX).is_file():
            whole, parts = read_distributed(file)
        else:
            whole = _mapping(read_pickled(file), file)
        path, found = _unwrap(whole, file, key)
        tensors, dropped = _tensors(found, file, nested=bool(path))
        state |= tensors
    others = [name for name in _NESTINGS if path and name != path[0] and _is_weights(whole.get(name))]
    weights = TensorWeights(state) if parts is None else StoredWeights(state, parts)
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
