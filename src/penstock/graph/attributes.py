"""Attributes of modules assigned in a forward pass: capture restores them, and later reads raise an error.

A capture runs the forward once, with tensors that have no values. So attributes assigned in it, such as `self.kl = ...`
for a loss computed outside, or `self.calls += 1`, are restored afterwards; a later read raises an error instead of
returning the old value.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import CaptureError, UsageError

_OF_MODULES = frozenset({*vars(nn.Module()), "_call_impl"})


@contextlib.contextmanager
def left_attributes(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Restore attributes on exit; yields a dict that is then filled with the assigned values, by path.

    Tensors are represented by None, including tensors in lists and dicts.

    Example:
        with left_attributes(model) as left:
            model(x)
        left        # {"encoder.kl": None, "calls": 1}
    """
    left: dict[str, Any] = {}
    before = {path: (module, _attributes(module)) for path, module in model.named_modules()}
    yield left
    for path, (module, was) in before.items():
        for name, (value, items) in _attributes(module).items():
            old, old_items = was.get(name, (_MISSING, None))
            if value is old and _alike(items, old_items):
                continue
            has_tensors = any(isinstance(leaf, (Tensor, torch.SymInt)) for leaf in pytree.tree_leaves(value))
            counts = isinstance(value, (int, float)) and isinstance(old, (int, float)) and value != old
            if not has_tensors and not counts:
                continue
            left[f"{path}.{name}" if path else name] = None if has_tensors else value
            if old is _MISSING:
                del vars(module)[name]
                continue
            vars(module)[name] = old
            if isinstance(old, list):
                old[:] = old_items
            elif isinstance(old, dict):
                old.clear()
                old.update(old_items)


_MISSING = object()


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes made by a module's own code; lists and dicts come with a copy."""
    return {
        name: (value, value.copy() if isinstance(value, (list, dict)) else None)
        for name, value in vars(module).items()
        if name not in _OF_MODULES
    }


def _alike(items: Any, others: Any) -> bool:
    if type(items) is not type(others) or (items is not None and len(items) != len(others)):
        return False
    if isinstance(items, dict):
        return all(key in others and others[key] is value for key, value in items.items())
    return items is None or all(a is b for a, b in zip(items, others, strict=True))


@contextlib.contextmanager
def unresized_buffers(model: nn.Module) -> Iterator[None]:
    """Refuse a forward pass that changes the shape or dtype of a buffer, or registers one.

    Raises `CaptureError` at the end of the context.
    """
    before = {path: dict(module._buffers) for path, module in model.named_modules()}
    formats = {path: {name: _format(buffer) for name, buffer in own.items()} for path, own in before.items()}
    yield
    for path, module in model.named_modules():
        was = formats.get(path, {})
        for name, buffer in list(module._buffers.items()):
            if (now := _format(buffer)) != was.get(name):
                module._buffers[name] = before.get(path, {}).get(name)
                if name not in was:
                    del module._buffers[name]
                at = f"{path}.{name}" if path else name
                way = (
                    "register it in __init__, or call the model once before the pipeline is made"
                    if was.get(name) is None
                    else "keep its shape and dtype: make it as large as it becomes, and write into a part of it"
                )
                raise CaptureError(f"the forward pass makes the buffer {at} {now}, which was {was.get(name)}; {way}")


def _format(buffer: Tensor | None) -> str | None:
    return (
        None
        if buffer is None
        else f"{str(buffer.dtype).removeprefix('torch.')} [{', '.join(str(size) for size in buffer.shape)}]"
    )


class HiddenAttributes:
    """Attributes that a forward pass assigns: while a pipeline trains, reading them from outside raises `UsageError`.

    Attributes that were None or missing before stay as they were, so that using them fails too.
    """

    def __init__(self, model: nn.Module, left: Mapping[str, Any]) -> None:
        self._owners = [(model.get_submodule(path), name) for path, _, name in (key.rpartition(".") for key in left)]
        self._values: list[tuple[nn.Module, str, Any]] = []

    def hide(self) -> None:
        """Replace the values by objects that raise an error."""
        for module, name in self._owners:
            value = vars(module).get(name)
            if value is not None and not isinstance(value, _Hidden):
                self._values.append((module, name, value))
                vars(module)[name] = _Hidden(name)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Restore hidden values within the context."""
        was_hidden = bool(self._values)
        self.show()
        try:
            yield
        finally:
            if was_hidden:
                self.hide()

    def show(self) -> None:
        """Restore the values."""
        while self._values:
            module, name, value = self._values.pop()
            vars(module)[name] = value


@dataclass(frozen=True, slots=True, eq=False)
class _Hidden:
    """A placeholder that raises `UsageError` on any use as a value."""

    name: str

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError(
            f"the forward pass assigns self.{self.name}, whose value stays in the stage that computes it; return it as "
            "an output of the model instead"
        )

    @classmethod
    def __torch_function__(cls, _func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise `UsageError` if used as an argument of a torch function."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        given[0]._refuse()

    def __getattr__(self, name: str) -> Any:
        """Raise `UsageError` for all attributes except those that Python itself looks up."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __pow__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __float__ = __int__ = __len__ = _refuse
    __iter__ = __getitem__ = __format__ = _refuse
