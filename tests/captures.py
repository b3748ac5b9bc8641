"""One capture of equal models: the tests capture the same few small models again and again, most of a second each."""

import copyreg
import dataclasses
import importlib
import io
import pickle
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.graph.graph import Graph

capture: Any = importlib.import_module("penstock.graph.capture")
translate: Any = importlib.import_module("penstock.graph.translate")
_KNOWN: dict[bytes, tuple[Graph, Mapping[str, Any]]] = {}  # with the names that were read, by path of the module


class _Key(pickle.Pickler):
    """Writes all that a capture may read: of parameters, buffers and examples only how they look."""

    def __init__(self, file: io.BytesIO, model: nn.Module, examples: Any) -> None:
        super().__init__(file)
        self._unread = {id(each) for each in (*model.parameters(), *model.buffers(), *pytree.tree_leaves(examples))}
        self._numbers: dict[int, int] = {}  # of each tensor: those that are tied have one

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):  # as it is, whatever it writes when it is saved
            forward: Any = type(obj).forward
            return copyreg.__newobj__, (type(obj),), {**vars(obj), "forward at": id(forward)}  # type: ignore[attr-defined]
        return NotImplemented

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._unread:
            raise pickle.PicklingError("a graph would hold this tensor")
        looks = (type(obj).__name__, obj.shape, obj.stride(), str(obj.dtype), obj.device.type, obj.requires_grad)
        return self._numbers.setdefault(id(obj), len(self._numbers)), looks


def _key(model: nn.Module, arguments: Any, keywords: Any, *rest: Any) -> bytes | None:
    file = io.BytesIO()
    settings = (
        torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(), id(torch.export.export), id(capture.translate),
        id(translate.share_heads),
    )  # fmt: skip
    try:
        _Key(file, model, (arguments, keywords)).dump((model, arguments, keywords, rest, settings))
    # what cannot be written, as a class within a function, is captured each time
    except Exception:
        return None
    return file.getvalue()


@contextmanager
def once() -> Iterator[None]:
    """Capture equal models once, but for those whose graphs hold objects of the model, or of which a note is said."""
    export, note = capture._export, capture.note

    def known(model: nn.Module, *given: Any, **named: Any) -> Graph:
        key = _key(model, *given, sorted(named.items()))
        if key in _KNOWN:
            found, reads = _KNOWN[key]
            paths, buffers = dict(model.named_modules()), dict(model.named_buffers(remove_duplicate=False))
            return dataclasses.replace(
                found,
                reads={weakref.ref(paths[at]): names for at, names in reads.items()},
                constants={name: buffers.get(name, tensor) for name, tensor in found.constants.items()},
            )
        with mock.patch.object(capture, "note", side_effect=note) as said:
            graph: Graph = export(model, *given, **named)
        where = {weakref.ref(module): path for path, module in model.named_modules()}
        others = {type(ref()).__module__ for ref in graph.reads if ref not in where}  # of a list, or of everybody
        own = said.called or graph.callbacks or graph.left or others - {"transformers.activations", "builtins"}
        if key and not own:
            _KNOWN[key] = graph, {where[ref]: names for ref, names in graph.reads.items() if ref in where}
        return graph

    with mock.patch.object(capture, "_export", known):
        yield
