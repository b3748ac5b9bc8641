"""A batch as a document and one buffer: containers and small values as JSON, tensors packed with their strides."""

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock import trees
from penstock.errors import TransportError, UsageError
from penstock.graph.ops import DTYPES
from penstock.tensors import HOST, aligned, num_payload_bytes, num_spread_bytes, pack, unpack

# methods that read memory without an operator
_READS = {
    getattr(Tensor, name) for name in (
        "numpy", "tolist", "data_ptr", "storage", "untyped_storage", "__array__", "__reduce_ex__", "__dlpack__",
        "__format__", "share_memory_",
    )
}  # fmt: skip
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_"}
# results that depend on shapes alone
_CONSTANT = {
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
}
_NAMES = {"_local_scalar_dense": "item(), bool(), float() or int()", "index": "a mask", "index_put_": "a mask"}


class StandIn(Tensor):
    """A tensor without values, in place of a tensor that only `holder` has loaded.

    Shapes, slices, arithmetic and moves between devices work and return stand-ins. Random functions advance the
    generator as they do on the holder, so that random states stay the same on all ranks.

    Example:
        images = StandIn(torch.empty(8, 3, 224, 224, device="meta"), "rank 0 (desk)")
        images[:4].to(torch.bfloat16).shape

    Raises `UsageError` for operations that need the values.
    """

    _meta: Tensor
    _holder: str

    @staticmethod
    def __new__(cls, meta: Tensor, holder: str, device: torch.device = HOST) -> "StandIn":
        """Create a stand-in with the shape, strides and dtype of a meta tensor."""
        made: StandIn = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made._meta, made._holder = meta, holder
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        del tensor_contents
        return f"StandIn({str(self.dtype).removeprefix('torch.')} {list(self.shape)}, values on {self._holder})"

    def __deepcopy__(self, _memory: Any) -> "StandIn":
        return StandIn(self._meta, self._holder, self.device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, unless it reads memory."""
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.__format__ and not any(args[1:]):
            return repr(args[0])
        if func in _READS:
            _refuse(func.__name__, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on shapes."""
        kwargs = kwargs or {}
        given, name = _stand_ins((args, kwargs)), func.name().partition(".")[0]
        written = _written(func, args, kwargs)
        indexed, drawn = name in _INDEXED, torch.Tag.nondeterministic_seeded in func.tags
        unknown = (
            any(x.dtype == torch.bool for x in _stand_ins(args[1]))
            if indexed
            else any(tag in func.tags for tag in _BY_VALUE)
        )
        if unknown or not all(isinstance(x, StandIn) for x in written):
            _refuse(name.removeprefix("aten::"), args, kwargs)
        if drawn or name in _CONSTANT:
            found = func(*pytree.tree_map(_scratch, args), **pytree.tree_map(_scratch, dict(kwargs)))
            if name in _CONSTANT or "_like" in name:
                return found
        else:
            # real masks and indices decide a shape
            run_args, run_kwargs = pytree.tree_map(_known_shape if indexed else _shape, (args, dict(kwargs)))
            if "device" in run_kwargs:
                run_kwargs["device"] = torch.device("meta")
            found = func(*run_args, **run_kwargs)
        device = torch.device(kwargs.get("device") or given[0].device)

        def wrapped(x: Any) -> Any:
            return StandIn(x.to("meta"), given[0]._holder, device) if isinstance(x, Tensor) else x

        return written[0] if written else pytree.tree_map(wrapped, found)


class Absent:
    """An object of a batch that cannot be sent to other ranks; any use of it there raises `UsageError`."""

    def __init__(self, kind: str, holder: str) -> None:
        self._kind, self._holder = kind, holder

    def __repr__(self) -> str:
        return f"Absent({self._kind} on {self._holder})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"a {self._kind} of the batch is only on {self._holder}, which loaded it; let collate_fn return tensors, "
            "numbers and text for what the loop uses"
        )


def _stand_ins(tree: Any) -> list[StandIn]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, StandIn)]


def _shape(x: Any) -> Any:
    return x._meta if isinstance(x, StandIn) else x.to("meta") if isinstance(x, Tensor) else x


def _known_shape(x: Any) -> Any:
    return x._meta if isinstance(x, StandIn) else x


def _scratch(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, StandIn) else x


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tensors that an operator writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [each for each in found if each is not None]


def _refuse(what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    (first, *_) = _stand_ins((args, kwargs))
    shape = f"{str(first.dtype).removeprefix('torch.')} {list(first.shape)}"
    raise UsageError(
        f"{_NAMES.get(what, what)} needs the values of a tensor {shape} that only {first._holder} has loaded; this "
        "process has its shape alone: compute with it in the data set, in collate_fn, or in loss_fn with the tensor "
        "passed as labels"
    )


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
        isinstance(leaf, Tensor)
        and not isinstance(leaf, StandIn)
        and leaf.layout == torch.strided
        and not leaf.is_nested
        and str(leaf.dtype).removeprefix("torch.") in DTYPES
    )


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
