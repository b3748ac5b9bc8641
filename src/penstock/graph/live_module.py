"""The parts of a model that its capture read: a graph stays as it was, so a later change of the model must be noticed.

A forward pass is Python, and the attributes that it reads are part of the captured graph. While a model is captured,
the attributes that its modules' code reads are recorded; later they are compared with the values that they had.
"""

import contextlib
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_OF_MODULES = frozenset({*vars(nn.Module()), "_call_impl"})
_MISSING = object()
_LEVELS = 4  # of lists, dicts and objects within an attribute
_MOST_VALUES = 20_000  # within the attributes of a model
_CALLED_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_CALLED_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_CALLED_EVERYWHERE = ("_global_forward_hooks", "_global_forward_pre_hooks")
_PLAIN = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, nn.Module, torch.Generator,
    np.random.Generator, str, bytes, int, float, complex, torch.dtype, torch.device, types.NoneType,
)  # fmt: skip

# names that the forward pass read, by module
Reads = Mapping["weakref.ref[nn.Module]", Collection[str]]


@contextlib.contextmanager
def recorded_reads() -> Iterator[dict["weakref.ref[nn.Module]", set[str]]]:
    """Record the attributes of modules that are read inside the context, in this thread.

    Example:
        with recorded_reads() as reads:
            model(x)
    """
    reads: dict[weakref.ref[nn.Module], set[str]] = {}
    found: dict[int, set[str]] = {}
    get, thread = object.__getattribute__, threading.get_ident()

    def record(module: nn.Module, name: str) -> Any:
        if threading.get_ident() == thread:
            names = found.get(id(module))
            if names is None:
                names = found[id(module)] = reads.setdefault(weakref.ref(module), set())
            names.add(name)
        return get(module, name)

    nn.Module.__getattribute__ = record  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__


@dataclass(frozen=True, slots=True)
class _Part:
    """One module as it was: children, hooks, and the attributes that the forward read."""

    path: str
    module: "weakref.ref[nn.Module]"
    kind: type
    training: bool
    children: tuple[tuple[str, int], ...]
    hooks: frozenset[int]
    removable: frozenset[int]
    attributes: tuple[tuple[str, Any], ...]


class LiveModule:
    """A model as its capture saw it.

    Example:
        live = LiveModule(model, graph.reads)
        model.temperature = 2.0
        live.changed()      # "temperature was 1.0 at the capture and is 2.0 now"

    Attributes in `ignored`, by path, are not compared. Modules are held weakly.
    """

    def __init__(self, model: nn.Module, reads: Reads, ignored: Collection[str] = ()) -> None:
        self._contents: list[tuple[str, Any, Any]] = []  # path, a list, dict or array, and its copy
        self._tensors: list[tuple[str, weakref.ref[Tensor], tuple[int, int]]] = []
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._seen: set[int] = set()
        paths = {weakref.ref(module): path for path, module in model.named_modules()}
        self._parts = [self._part(path, ref, reads.get(ref, ()), ignored) for ref, path in paths.items()]
        self._parts += [
            self._part(type(module).__name__, ref, names, ignored)
            for ref, names in reads.items()
            if ref not in paths and (module := ref()) is not None  # in a plain list, for example
        ]
        kinds = {(part.kind, name) for part in self._parts for name, _ in part.attributes}
        self._classes = [(kind, name, getattr(kind, name, _MISSING)) for kind, name in kinds]
        self._everywhere = _hooks(vars(torch_module), _CALLED_EVERYWHERE)
        self._seen.clear()

    def _part(
        self, path: str, ref: "weakref.ref[nn.Module]", names: Collection[str], ignored: Collection[str]
    ) -> _Part:
        module = ref()
        if module is None:
            raise RuntimeError("a module ended while it was captured")
        own = vars(module)
        attributes = []
        for name in sorted(set(names) - _OF_MODULES):
            at = f"{path}.{name}" if path else name
            if at in ignored:
                continue
            value = own.get(name, _MISSING)
            self._keep(at, value, _LEVELS)
            attributes.append((name, value))
        return _Part(
            path,
            ref,
            type(module),
            module.training,
            _children(own),
            _hooks(own, _CALLED_FORWARD),
            _hooks(own, _CALLED_BACKWARD),
            tuple(attributes),
        )

    def _keep(self, path: str, value: Any, levels: int) -> None:
        """Keep a copy of what a list, dict, array, tensor or object holds, and of what is inside."""
        if isinstance(value, _PLAIN) or not levels or id(value) in self._seen or len(self._seen) > _MOST_VALUES:
            return
        self._seen.add(id(value))
        inside: Collection[tuple[object, Any]] = ()
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                self._tensors.append((path, weakref.ref(value), version_of(value)))
        elif isinstance(value, np.ndarray):
            self._contents.append((path, value, value.copy()))
        elif isinstance(value, (list, dict, set, deque)):
            self._contents.append((path, value, value.copy()))
            inside = value.items() if isinstance(value, dict) else list(enumerate(value))
        elif isinstance(value, (tuple, frozenset)):
            inside = list(enumerate(value))
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._contents.append((path, vars(value), dict(vars(value))))
            inside = vars(value).items()
        for name, item in list(inside):
            self._keep(f"{path}.{name}", item, levels - 1)

    def rebuilt(self, *, modes: bool = True) -> str:
        """Return which module has other children, hooks or, with `modes`, another mode than at the capture, or ""."""
        if _hooks(vars(torch_module), _CALLED_EVERYWHERE) != self._everywhere:
            return "torch.nn.modules has other global forward hooks"
        for part in self._parts:
            module = part.module()
            if module is None:
                continue
            own = vars(module)
            if modes and own["training"] is not part.training:
                return f"{part.path or part.kind.__name__} has another mode (train, eval)"
            if (own["_modules"] or part.children) and _children(own) != part.children:
                return f"{part.path or part.kind.__name__} has other submodules"
            if _has_hooks(own) or part.hooks:
                # a removed backward hook is just not called any more; a removed forward hook is still in the graph
                added = not _hooks(own, _CALLED_BACKWARD) <= part.removable
                if added or _hooks(own, _CALLED_FORWARD) != part.hooks:
                    return f"{part.path or part.kind.__name__} has other hooks"
        return ""

    def changed(self) -> str:
        """Return which attribute has another value than at the capture, and both values, or ""."""
        for part in self._parts:
            module = part.module()
            if module is None:
                continue
            own = vars(module)
            if type(module) is not part.kind:
                return f"{part.path} was a {part.kind.__name__} at the capture and is a {type(module).__name__} now"
            for name, was in part.attributes:
                now = own.get(name, _MISSING)
                if now is not was and not _same(now, was):
                    return _told(f"{part.path}.{name}" if part.path else name, was, now)
        for kind, name, was in self._classes:
            if (now := getattr(kind, name, _MISSING)) is not was and not _same(now, was):
                return _told(f"{kind.__name__}.{name}", was, now)
        for path, container, was in self._contents:
            if not _same(container, was):
                return f"the contents of {path} are others than at the capture{_difference(container, was)}"
        return self.written()

    def written(self) -> str:
        """Return which tensor outside of parameters and buffers was written to since the capture, or ""."""
        for path, ref, version in self._tensors:
            tensor = ref()
            if tensor is not None and tensor.device.type != "meta" and version_of(tensor) != version:
                return f"the tensor {path} was written to after the capture"
        return ""


def _children(own: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple([(name, id(child)) for name, child in own["_modules"].items()])


def _has_hooks(own: Mapping[str, Any]) -> bool:
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def _hooks(own: Mapping[str, Any], kinds: Collection[str]) -> frozenset[int]:
    return frozenset(number for kind in kinds for number in own[kind])


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return a pair that changes when a tensor is written to or gets other memory."""
    if tensor.is_inference() or tensor.device.type == "meta":
        return 0, 0
    return tensor._version, tensor.data_ptr()


def _same(now: Any, was: Any) -> bool:
    """Return whether two values are equal; objects that cannot be compared are not."""
    if isinstance(now, Tensor) or isinstance(was, Tensor):
        return now is was
    try:
        return bool(np.array_equal(now, was)) if isinstance(now, np.ndarray) else bool(now == was)
    # objects compare as their authors like; what fails is treated as different
    except Exception:
        return False


def _told(path: str, was: Any, now: Any) -> str:
    def show(value: Any) -> str:
        return "missing" if value is _MISSING else " ".join(repr(value).split())[:60]

    return f"{path} was {show(was)} at the capture and is {show(now)} now"


def _difference(now: Any, was: Any) -> str:
    if not isinstance(now, dict):
        return ""
    names = [str(name) for name in {**was, **now} if not _same(now.get(name, _MISSING), was.get(name, _MISSING))]
    return f" ({', '.join(names[:3])})" if names else ""
