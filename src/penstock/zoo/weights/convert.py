"""Convert a pickled checkpoint to safetensors without running code from the file."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.text import one_line
from penstock.zoo.weights.weight_files import save_weights
from penstock.zoo.weights.weights import TensorWeights

# keys under which training scripts save the weights, in search order: averaged weights first, because the scripts' own
# evaluation uses those
_NESTINGS = ("model_ema", "state_dict_ema", "ema", "model", "state_dict", "module", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion, with the entries of the checkpoint that are not tensors."""

    num_tensors: int
    num_bytes: int
    dropped: tuple[str, ...]


def convert_checkpoint(source: Path, target: Path) -> Converted:
    """Write the tensors of a .pth, .pt or .bin checkpoint as one safetensors file.

    The weights may be under `model_ema`, `state_dict_ema`, `ema`, `model`, `state_dict`, `module` or
    `model_state_dict`, searched in this order and also nested; the prefixes `module.` and `_orig_mod.` are removed if
    all names have them. Shapes and dtypes stay. A tensor with several names is written under each name. The target is
    written atomically.

    >>> convert_checkpoint(Path("deit.pth"), Path("deit.safetensors")).num_tensors  # doctest: +SKIP
    152

    Raises `ModelError` if the source is missing or damaged, contains no tensors or contains pickled objects, and if the
    target cannot be written.
    """
    state, dropped = _tensors(_unwrap(_read(source), source), source)
    num_bytes = save_weights(TensorWeights(state), target)
    return Converted(num_tensors=len(state), num_bytes=num_bytes, dropped=dropped)


def _read(source: Path) -> object:
    if not source.is_file():
        raise ModelError(f"checkpoint {source} not found; check the path")
    if source.suffix == ".safetensors":
        raise ModelError(f"{source} is safetensors already; give it with --weights")
    try:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as problem:
            if "mmap" not in str(problem):
                raise
            # files written before torch 1.6 are not zip archives and cannot be mapped
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        if "Weights only load failed" not in str(problem) or "GLOBAL" not in str(problem):
            raise ModelError(f"{source} is not a PyTorch checkpoint ({one_line(problem, 80)})") from problem
        raise ModelError(
            f"{source} holds pickled objects, not only tensors; where it was made, save "
            "model.state_dict() instead and convert that"
        ) from problem
    except Exception as problem:  # a damaged pickle may raise anything
        raise ModelError(
            f"{source} is damaged or not a PyTorch checkpoint ({one_line(problem, 80)}); copy it again"
        ) from problem


def _unwrap(value: object, source: Path) -> Mapping[object, object]:
    """Follow the usual nesting to the mapping that contains the tensors."""
    if not isinstance(value, Mapping):
        raise ModelError(f"{source} holds a {type(value).__name__}, not tensors by name; save a state_dict")
    for key in _NESTINGS:
        inner = value.get(key)
        if isinstance(inner, Mapping) and _holds_tensors(inner):
            return _unwrap(inner, source)
    return value


def _holds_tensors(value: Mapping[object, object]) -> bool:
    if any(isinstance(item, Tensor) for item in value.values()):
        return True
    return any(isinstance(value.get(key), Mapping) for key in _NESTINGS)


def _tensors(state: Mapping[object, object], source: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors by clean name, and the names of everything else."""
    tensors = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ModelError(f"{source} holds no tensors; its entries are {', '.join(map(str, list(state)[:5]))}")
    sparse = [key for key, value in tensors.items() if value.layout != torch.strided or value.is_quantized]
    if sparse:
        raise ModelError(f"{source} holds {sparse[0]} as a sparse or quantized tensor; save it as a dense tensor")
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors, tuple(str(key) for key, value in state.items() if not isinstance(value, Tensor))
