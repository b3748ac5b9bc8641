"""Models with narrowed layers: their sizes in a weights file, and narrowing of a newly built model."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.zoo.weights.weights import Shape

KEY = "penstock.shapes"  # in the metadata of a safetensors file

Sizes = dict[str, dict[str, int | list[int]]]


def changed_sizes(original: nn.Module, narrowed: nn.Module) -> Sizes:
    """Return the integer attributes of each module that differ between a model and its narrowed version.

    >>> changed_sizes(nn.Linear(8, 4), nn.Linear(6, 4))
    {'': {'in_features': 6}}
    """
    found: Sizes = {}
    modules = dict(narrowed.named_modules())
    for path, module in original.named_modules():
        if path not in modules:
            raise ModelError(
                f"a narrowed model must have all modules of the original; {path} not found; only narrow its layers"
            )
        now = _sizes_of(modules[path])
        for name, before in _sizes_of(module).items():
            value = now.get(name, before)
            if type(value) is type(before) and value != before:
                found.setdefault(path, {})[name] = value if isinstance(value, int) else list(value)
    return found


def write_sizes(sizes: Sizes) -> dict[str, str]:
    """Return the sizes of a narrowed model as metadata of a weights file."""
    return {KEY: msgspec.json.encode(sizes).decode()}


def read_sizes(metadata: Mapping[str, str]) -> Sizes | None:
    """Read the sizes of a narrowed model from a weights file's metadata; None without them.

    Raises `ModelError` for invalid text.
    """
    if KEY not in metadata:
        return None
    try:
        return msgspec.json.decode(metadata[KEY], type=Sizes)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"the file's {KEY} cannot be read ({error}); write the narrowed model again") from None


def narrow(module: nn.Module, sizes: Sizes, shapes: Mapping[str, Shape]) -> None:
    """Narrow a model in place to the sizes and tensor shapes of a file; tensors lose their values.

    Example:
        narrow(model, {"fc": {"out_features": 6}}, {"fc.weight": (6, 8), "fc.bias": (6,)})

    Raises `ModelError` for a module or attribute that the model does not have, and for anything that grows.
    """
    modules = dict(module.named_modules())
    for path, attributes in sizes.items():
        if path not in modules:
            raise ModelError(f"the weights were narrowed at {path!r}, which the model does not have; {_OTHER}")
        known = _sizes_of(modules[path])
        for name, value in attributes.items():
            before = known.get(name)
            given = value if isinstance(value, int) else tuple(value)
            if before is None or type(given) is not type(before) or not _at_most(given, before):
                raise ModelError(f"the weights narrow {path}.{name} from {before!r} to {value!r}; {_OTHER}")
            setattr(modules[path], name, given)
    made: dict[int, Any] = {}  # tied parameters stay one
    for path, owner in module.named_modules(remove_duplicate=False):
        for kept in (owner._parameters, owner._buffers):
            _cut(path, kept, shapes, made)


_OTHER = "use the model from which they were made"


def _cut(path: str, kept: dict[str, Any], shapes: Mapping[str, Shape], made: dict[int, Any]) -> None:
    for leaf, tensor in kept.items():
        name = f"{path}.{leaf}" if path else leaf
        if tensor is None or name not in shapes or tuple(tensor.shape) == shapes[name]:
            continue
        if len(shapes[name]) != tensor.dim() or not _at_most(shapes[name], tuple(tensor.shape)):
            raise ModelError(f"the weights narrow {name} from {tuple(tensor.shape)} to {shapes[name]}; {_OTHER}")
        if id(tensor) not in made:
            values = torch.empty(shapes[name], dtype=tensor.dtype, device=tensor.device)
            new = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
            made[id(tensor)] = made[id(new)] = new
        kept[leaf] = made[id(tensor)]


def _sizes_of(module: nn.Module) -> dict[str, int | tuple[int, ...]]:
    """Return a module's own attributes that are integers or tuples of integers."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and _is_size(value)}


def _is_size(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_size(item) and not isinstance(item, tuple) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _at_most(value: int | Collection[int], before: Any) -> bool:
    if isinstance(value, int):
        return bool(1 <= value <= before)
    return len(value) == len(before) and all(1 <= new <= old for new, old in zip(value, before, strict=True))
