"""Stand-ins for a batch's values that are in another process: they have shapes and types, and no values."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import UsageError
from penstock.tensors import HOST

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
_CONSTANT = {"aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros", "aten::new_ones",
             "aten::new_full"}  # fmt: skip
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
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device=device,
        )  # fmt: skip
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
        unknown = any(x.dtype == torch.bool for x in _stand_ins(args[1])) if indexed else any(
            tag in func.tags for tag in _BY_VALUE
        )  # fmt: skip
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
