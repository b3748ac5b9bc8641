"""What a forward pass leaves in attributes of its modules: capture undoes it, and says where it would be missed.

A capture runs the forward once, with tensors that have no values. So an attribute such as `self.kl = ...`, which a loss
outside would add, or `self.calls += 1`, is as it was before; who reads it later gets an error, not the value of before.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import UsageError

_OF_MODULES = frozenset({*vars(nn.Module()), "_call_impl"})


@contextlib.contextmanager
def left_attributes(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Bring attributes to what they were before; yields a dict that has then, by their paths, what they got.

    Tensors, also in lists and dicts, are given as None.

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
    """Return the attributes that a module's own code has made, those with items also with a copy of them."""
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


class HiddenAttributes:
    """Attributes that a forward pass assigns: while a pipeline trains, reading one from outside raises `UsageError`.

    Those that were None or not there before stay so, which an error tells as well.
    """

    def __init__(self, model: nn.Module, left: Mapping[str, Any]) -> None:
        self._owners = [(model.get_submodule(path), name) for path, _, name in (key.rpartition(".") for key in left)]
        self._values: list[tuple[nn.Module, str, Any]] = []

    def hide(self) -> None:
        """Put what raises in the place of their values."""
        for module, name in self._owners:
            value = vars(module).get(name)
            if value is not None and not isinstance(value, _Hidden):
                self._values.append((module, name, value))
                vars(module)[name] = _Hidden(name)

    def show(self) -> None:
        """Put their values back."""
        while self._values:
            module, name, value = self._values.pop()
            vars(module)[name] = value


@dataclass(frozen=True, slots=True, eq=False)
class _Hidden:
    """Raises `UsageError` wherever it is used as a value."""

    name: str

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError(
            f"the forward pass assigns self.{self.name}, whose value stays in the stage that computes it; return it as "
            "an output of the model instead"
        )

    @classmethod
    def __torch_function__(cls, _func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be an argument of torch's."""
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        given[0]._refuse()

    def __getattr__(self, name: str) -> Any:
        """Refuse to have anything but what Python itself looks for."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __pow__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __float__ = __int__ = __len__ = _refuse
    __iter__ = __getitem__ = __format__ = _refuse
