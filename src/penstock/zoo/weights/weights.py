"""Sources of a model's tensors, loaded one at a time."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.text import nearest

Shape = tuple[int, ...]
Expected = Mapping[str, tuple[Shape, torch.dtype]]
_Known = TypeVar("_Known")
_FINGERPRINT_VALUES = 4096  # from each tensor: trained weights differ everywhere


class Weights(Protocol):
    """Named tensors on the CPU, each loaded on request; callers only read them.

    >>> ModuleWeights(nn.Linear(2, 3)).shape("weight")
    (3, 2)

    Every method raises `ModelError` for a missing name.
    """

    def names(self) -> Collection[str]:
        """Return every name that can be loaded."""

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape without loading it."""

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype without loading it."""

    def load(self, name: str) -> Tensor:
        """Return one tensor, fresh or memory-mapped."""


def fingerprint_of(weights: Weights) -> str:
    """Return a hash of the weights: names, shapes, dtypes, and the beginning of each tensor.

    >>> fingerprint_of(TensorWeights({"w": torch.zeros(2)})) == fingerprint_of(TensorWeights({"w": torch.ones(2)}))
    False
    """
    digest = hashlib.sha256()
    for name in sorted(weights.names()):
        digest.update(f"{name} {weights.dtype(name)} {list(weights.shape(name))}".encode())
        source, own = origin_of(weights, name)
        begin = source.beginning(own) if isinstance(source, PackedWeights) else weights.load(name)
        beginning = begin.detach().reshape(-1)[:_FINGERPRINT_VALUES]
        digest.update(beginning.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class ByName(Generic[_Known]):
    """Base class of weights with an entry for each tensor name; see `Weights` for the methods of derived classes."""

    is_random = False  # True if some were drawn in this process
    _holder = "the model has"

    def __init__(self, known: Mapping[str, _Known]) -> None:
        self._known = known

    def names(self) -> Collection[str]:
        """Return every name that can be loaded."""
        return self._known.keys()

    def origin(self, name: str) -> tuple[Weights, str]:
        """Return the weights that hold a tensor, and its name there."""
        return self, name  # type: ignore[return-value]

    def _find(self, name: str) -> _Known:
        if name not in self._known:
            raise ModelError(f"{self._holder} no tensor {name}{nearest(name, self._known)}")
        return self._known[name]


def origin_of(weights: Weights, name: str) -> tuple[Weights, str]:
    """Return the weights that hold a tensor of these weights, and its name there."""
    return weights.origin(name) if isinstance(weights, ByName) else (weights, name)


class PackedWeights(ABC, ByName[_Known]):
    """Weights that a stage may hold in the bits of their file; see `packing.py`."""

    @abstractmethod
    def packing(self, name: str) -> str:
        """Return the block format of a tensor; empty if it must be loaded as numbers."""

    @abstractmethod
    def load_packed(self, name: str) -> Tensor:
        """Return the bytes of a tensor with a block format, [O, bytes]."""

    @abstractmethod
    def beginning(self, name: str) -> Tensor:
        """Return the first stored bytes of a tensor."""


class TensorWeights(ByName[Tensor]):
    """Tensors in memory, or memory-mapped.

    >>> TensorWeights({"bias": torch.zeros(3)}).load("bias")
    tensor([0., 0., 0.])

    `load` raises `ModelError` for a missing name, or a tensor without values.
    """

    _holder = "the weights have"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__({name: tensor.detach() for name, tensor in tensors.items()})

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape."""
        return tuple(self._find(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype."""
        return self._find(name).dtype

    def load(self, name: str) -> Tensor:
        """Return the tensor itself, on the CPU."""
        tensor = self._find(name)
        if tensor.device.type == "meta":
            raise ModelError(f"the tensor {name} has a shape but no values; give weights= or load it whole")
        return tensor.cpu()


class ModuleWeights(TensorWeights):
    """The current parameters and buffers of a live module, under each of their names.

    >>> sorted(ModuleWeights(nn.Linear(2, 3)).names())
    ['bias', 'weight']

    `load` raises `ModelError` for a missing name, or a parameter on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        super().__init__({**parameters, **dict(module.named_buffers(remove_duplicate=False))})


class RandomWeights(ModuleWeights):
    """Parameters and buffers as a module's constructor draws them, which it does at the first `load`.

    `module` has their names, shapes and dtypes, with parameters on the meta device; `draw` makes it with values.

    >>> RandomWeights(nn.Linear(2, 3, device="meta"), lambda: nn.Linear(2, 3)).load("weight").shape
    torch.Size([3, 2])

    `load` raises `ModelError` for a missing name, or if the constructor now makes another tensor.
    """

    is_random = True

    def __init__(self, module: nn.Module, draw: Callable[[], nn.Module]) -> None:
        super().__init__(module)
        self._draw = draw

    def load(self, name: str) -> Tensor:
        """Return one tensor; the first call draws all tensors."""
        expected, found = self._find(name), self._drawn.load(name)
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise ModelError(
                f"the model's constructor made {name} as {expected.dtype} {tuple(expected.shape)}, then as "
                f"{found.dtype} {tuple(found.shape)}; give weights=, or the module itself"
            )
        return found

    @cached_property
    def _drawn(self) -> Weights:
        return ModuleWeights(self._draw())


class DerivedWeights(ABC, ByName[_Known]):
    """Tensors of other weights: `at` returns the weights that have a tensor, and its name there."""

    @abstractmethod
    def at(self, name: str) -> tuple[Weights, str]:
        """Return where a tensor is; raises `ModelError` for a missing name."""

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape without loading it."""
        weights, there = self.at(name)
        return weights.shape(there)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype without loading it."""
        weights, there = self.at(name)
        return weights.dtype(there)

    def load(self, name: str) -> Tensor:
        """Return one tensor, fresh or memory-mapped."""
        weights, there = self.at(name)
        return weights.load(there)

    def origin(self, name: str) -> tuple[Weights, str]:
        """Return the weights that hold a tensor, and its name there."""
        return origin_of(*self.at(name))


class JoinedWeights(DerivedWeights[Weights]):
    """Several sources as one; for each name the first source that has it is used.

    >>> JoinedWeights(TensorWeights({"a": torch.ones(2)}), TensorWeights({"b": torch.ones(3)})).shape("b")
    (3,)

    Every method raises `ModelError` for a name missing in all of them.
    """

    def __init__(self, *parts: Weights) -> None:
        super().__init__({name: part for part in reversed(parts) for name in part.names()})
        self.is_random = any(getattr(part, "is_random", False) for part in self._known.values())

    def at(self, name: str) -> tuple[Weights, str]:
        """Return the first source that has a tensor, and its name."""
        return self._find(name), name


class RenamedWeights(DerivedWeights[str]):
    """Weights under other names: each name, and its name in `weights`.

    >>> RenamedWeights(TensorWeights({"fc.bias": torch.zeros(3)}), {"head.bias": "fc.bias"}).shape("head.bias")
    (3,)

    Every method raises `ModelError` for a missing name.
    """

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        super().__init__(names)
        self._weights = weights

    def at(self, name: str) -> tuple[Weights, str]:
        """Return the weights, and a tensor's name there."""
        return self._weights, self._find(name)
