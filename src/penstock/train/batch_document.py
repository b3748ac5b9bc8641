"""A batch as a document and one buffer: containers and small values as JSON, tensors packed with their strides."""

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock import trees
from penstock.errors import TransportError
from penstock.graph.encoding import DTYPES
from penstock.tensors import aligned, num_payload_bytes, num_spread_bytes, pack, unpack
from penstock.train.stand_in import Absent, StandIn

# bytes for each row up to which a tensor is sent to every rank: labels, token ids; beyond them a stand-in is
FLOAT_BYTES, OTHER_BYTES = 4 * 2**10, 64 * 2**10
_MOST_BYTES = 2**34  # of one tensor in memory
_PLAIN = (bool, int, float, str, type(None))
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Type, shape and strides of a tensor in a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorPlace":
        """Return a tensor's layout."""
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    @classmethod
    def read(cls, document: Sequence[Any]) -> "TensorPlace":
        """Decode a layout from another process; raises `TransportError` if it is none."""
        try:
            name, shape, strides = document
            made = cls(DTYPES[name], tuple(shape), tuple(strides))
        except (KeyError, TypeError, ValueError):
            raise TransportError("a batch from another rank has an unknown layout; start again") from None
        numbers = (*made.shape, *made.strides)
        if not all(type(number) is int and number >= 0 for number in numbers) or len(made.shape) != len(made.strides):
            raise TransportError("a batch from another rank has an invalid layout; start again")
        if made.num_bytes + num_spread_bytes(made.shape, made.strides, made.dtype.itemsize) > _MOST_BYTES:
            raise TransportError(f"a batch from another rank has a tensor {list(made.shape)} above the limit of 16 GiB")
        return made

    def write(self) -> list[Any]:
        """Encode the layout for a document."""
        return [str(self.dtype).removeprefix("torch."), list(self.shape), list(self.strides)]

    @property
    def num_bytes(self) -> int:
        """Bytes in the buffer."""
        return num_payload_bytes(self.shape, self.strides, self.dtype.itemsize)


def can_send(leaf: Any) -> bool:
    """Return whether a leaf is a tensor or an array that fits a buffer: dense, and of a type that programs know."""
    if isinstance(leaf, np.ndarray):
        return str(leaf.dtype) in DTYPES and not leaf.dtype.hasobject
    return (
        isinstance(leaf, Tensor) and not isinstance(leaf, StandIn) and leaf.layout == torch.strided
        and not leaf.is_nested and str(leaf.dtype).removeprefix("torch.") in DTYPES
    )  # fmt: skip


def pack_all(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one flat buffer."""
    layouts = [TensorPlace.of(tensor) for tensor in tensors]
    buffer = torch.empty(sum(aligned(layout.num_bytes) for layout in layouts), dtype=torch.uint8)
    begin = 0
    for tensor, layout in zip(tensors, layouts, strict=True):
        pack(tensor.detach().cpu(), buffer[begin : begin + layout.num_bytes])
        begin += aligned(layout.num_bytes)
    return buffer


def unpack_all(buffer: Tensor, layouts: Sequence[TensorPlace]) -> list[Tensor]:
    """Return the tensors of a buffer, as views of it where they have no gaps."""
    found, begin = [], 0
    for layout in layouts:
        data = buffer[begin : begin + layout.num_bytes]
        found.append(unpack(data, layout.dtype, layout.shape, layout.strides))
        begin += aligned(layout.num_bytes)
    return found


def buffer_for(layouts: Sequence[TensorPlace]) -> Tensor:
    """Allocate the buffer of `pack_all`."""
    return torch.empty(sum(aligned(layout.num_bytes) for layout in layouts), dtype=torch.uint8)


def _containers() -> dict[str, Any]:
    """Return the containers that any rank can make by name; transformers' only if it is in use here."""
    found: dict[str, Any] = {"PackedSequence": torch.nn.utils.rnn.PackedSequence}
    import sys

    for module, name in (("tokenization_utils_base", "BatchEncoding"), ("feature_extraction_utils", "BatchFeature")):
        if (loaded := sys.modules.get(f"transformers.{module}")) is not None:
            found[name] = getattr(loaded, name)
    return found


@dataclass
class BatchWriter:
    """Describes a batch of `num_rows` rows, and collects the tensors to send with it.

    Example:
        writer = BatchWriter(8)
        document, buffer = writer.describe(batch), pack_all(writer.tensors)
    """

    num_rows: int
    tensors: list[Tensor] = field(default_factory=list)

    def describe(self, tree: Any) -> Document:
        """Return the document of a tree."""
        if isinstance(tree, np.generic):
            tree = tree.item()
        if isinstance(tree, _PLAIN):
            return {"value": tree}
        if can_send(tree):
            return self._describe_tensor(tree)
        entries = trees.children(tree)
        if entries is None:
            return {"absent": type(tree).__name__}
        inner = [self.describe(value) for _, value in entries]
        keys, kind = [key for key, _ in entries], type(tree)
        if kind in (list, tuple):
            return {kind.__name__: inner}
        if kind is dict and all(isinstance(key, _PLAIN) for key in keys):
            return {"dict": inner, "keys": keys}
        if any(kind is known for known in _containers().values()):
            return {"known": kind.__name__, "in": inner, "keys": keys}
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return {"named": kind.__name__, "in": inner, "keys": list(tree._fields)}
        return {"own": kind.__qualname__, "in": inner}

    def _describe_tensor(self, leaf: Any) -> Document:
        kind = "tensor" if isinstance(leaf, Tensor) else "array"
        tensor = leaf if isinstance(leaf, Tensor) else torch.from_numpy(np.ascontiguousarray(leaf))
        layout = TensorPlace.of(tensor)
        limit = FLOAT_BYTES if tensor.dtype.is_floating_point or tensor.dtype.is_complex else OTHER_BYTES
        small = layout.num_bytes <= limit * max(1, self.num_rows)
        if small:
            self.tensors.append(tensor)
        elif kind == "array":
            return {"absent": f"array {list(tensor.shape)}"}
        return {kind: layout.write(), "sent": small}


class BatchReader:
    """Rebuilds a batch that `holder` has described.

    `example` returns a batch of this process with the same containers; it is called only for containers of the
    script's own types.
    """

    def __init__(self, holder: str, example: Callable[[], Any]) -> None:
        self._holder, self._example = holder, example
        self._tensors: list[Tensor] = []

    @staticmethod
    def layouts(document: Document) -> list[TensorPlace]:
        """Return the layouts of the tensors that follow a document, in order."""
        kind = next((kind for kind in ("tensor", "array") if kind in document), None)
        if kind is not None:
            return [TensorPlace.read(document[kind])] if document.get("sent") else []
        return [layout for inner in _inner(document) for layout in BatchReader.layouts(inner)]

    def rebuild(self, document: Document, tensors: Sequence[Tensor]) -> Any:
        """Return the batch."""
        self._tensors = list(reversed(tensors))
        try:
            return self._rebuild(document, ())
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise TransportError(f"{self._holder} has sent a batch of an unknown form ({error}); start again") from None

    def _rebuild(self, document: Document, path: tuple[int, ...]) -> Any:
        if "value" in document:
            return document["value"]
        if "absent" in document:
            return Absent(str(document["absent"]), self._holder)
        if "array" in document:
            return self._tensors.pop().numpy()
        if "tensor" in document:
            if document["sent"]:
                return self._tensors.pop()
            layout = TensorPlace.read(document["tensor"])
            meta = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
            return StandIn(meta, self._holder)
        values = [self._rebuild(inner, (*path, place)) for place, inner in enumerate(_inner(document))]
        if "list" in document or "tuple" in document:
            return values if "list" in document else tuple(values)
        if "own" in document:
            return self._rebuild_own(str(document["own"]), values, path)
        keys = [str(key) for key in document["keys"]] if "dict" not in document else document["keys"]
        if "named" in document:
            return namedtuple(str(document["named"]), keys, rename=True)(*values)
        made = dict(zip(keys, values, strict=True))
        if "dict" in document:
            return made
        known = _containers().get(str(document["known"]))
        if known is None:
            return made
        return known(*values) if issubclass(known, tuple) else known(made)

    def _rebuild_own(self, kind: str, values: list[Any], path: Sequence[int]) -> Any:
        node = self._example()
        for place in path:
            entries = trees.children(node) or []
            node = entries[min(place, len(entries) - 1)][1] if entries else None
        if type(node).__qualname__ != kind:
            raise TransportError(
                f"the batch has a {kind} on {self._holder} but a {type(node).__name__} here; run the same script on "
                "every rank"
            )
        return trees.rebuilt(node, values)


def _inner(document: Document) -> list[Document]:
    found: Any = next((document[kind] for kind in ("in", "dict", "list", "tuple") if kind in document), [])
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise TransportError("a batch from another rank has an unknown form; start again")
    return found
