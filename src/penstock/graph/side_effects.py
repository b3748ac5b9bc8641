"""Side effects of a forward pass: random numbers drawn without torch's operators, and attributes that it assigns.

A capture runs the forward once, with tensors that have no values. A graph would have the numbers that Python or numpy
drew at its capture, so such draws are refused. Attributes assigned in it, such as `self.kl = ...` for a loss computed
outside, or `self.calls += 1`, are restored afterwards; a later read raises an error instead of returning the old value.
"""

import contextlib
import linecache
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import CaptureError, UsageError

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(np.__file__).parent),
    str(Path(__file__).parents[1]),
    random.__file__,
    "<",
)
_ADVICE = "which a graph would draw once; draw them by torch, as in torch.rand(()), or make them an input"
_CODE = 80  # characters of a line in a message
_LONG = 16  # a tuple of more entries has numbers only


@dataclass(frozen=True, slots=True)
class _Source:
    """A generator of random numbers."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object]

    def key(self) -> Any:
        """Return its state in a form that can be compared."""
        return _comparable(self.read())


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return [(name, _comparable(item)) for name, item in state.items()]
    if isinstance(state, tuple) and len(state) < _LONG:
        return [_comparable(item) for item in state]
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _sources(objects: Iterable[Any]) -> list[_Source]:
    """Return the generators of Python and numpy that are global, and those among `objects`."""
    found = [
        _Source("Python's random", random.getstate, random.setstate),
        _Source("numpy.random", lambda: np.random.get_state(legacy=True), np.random.set_state),
    ]
    for each in {id(each): each for each in objects}.values():
        if isinstance(each, np.random.Generator):
            bits = each.bit_generator
            found.append(_Source("a numpy Generator", partial(getattr, bits, "state"), partial(setattr, bits, "state")))
        elif isinstance(each, np.random.RandomState):
            found.append(_Source("a numpy RandomState", each.get_state, each.set_state))
        elif isinstance(each, random.Random) and not isinstance(each, random.SystemRandom):
            found.append(_Source("a random.Random", each.getstate, each.setstate))
    return found


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the states of the global generators on exit."""
    sources = [*_sources(()), _Source("torch", torch.get_rng_state, torch.set_rng_state)]
    states = [source.read() for source in sources]
    try:
        yield
    finally:
        _restore(sources, states)


def _restore(sources: Sequence[_Source], states: Sequence[Any]) -> None:
    for source, state in zip(sources, states, strict=True):
        source.restore(state)


def call_without_draws(model: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a model's forward pass; raises `CaptureError` with the line that draws from a generator of Python or numpy.

    Generators are the global ones, those in attributes of modules, and those beside the code of the modules.
    """
    own = [value for module in model.modules() for value in vars(module).values()]
    around = {id(g): g for m in model.modules() if (g := getattr(type(m).forward, "__globals__", None)) is not None}
    sources = _sources([*own, *(value for names in around.values() for value in list(names.values()))])
    states, keys = [source.read() for source in sources], [source.key() for source in sources]
    with _refused():
        made = call(*args, **kwargs)
        moved = next((source for source, key in zip(sources, keys, strict=True) if source.key() != key), None)
        if moved is None:
            return made
        _restore(sources, states)
        try:
            where = _line(moved, lambda: call(*args, **kwargs))
        finally:
            _restore(sources, states)
    raise CaptureError(f"the forward pass draws random numbers from {moved.name}{where}, {_ADVICE}")


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Refuse functions that seed torch's generator, and random numbers of the system."""
    seeding = "which stages ignore; keep fixed noise in a buffer, and set seed= of the pipeline"
    replaced: list[tuple[Any, str, str]] = [
        (owner, name, seeding)
        for owner in (torch, torch.random)
        for name in ("manual_seed", "seed", "set_rng_state", "fork_rng")
        if hasattr(owner, name)
    ]
    replaced += [(os, "urandom", _ADVICE), (np.random, "default_rng", _ADVICE)]
    replaced += [(random.SystemRandom, name, _ADVICE) for name in ("random", "getrandbits")]
    was = [getattr(owner, name) for owner, name, _ in replaced]
    thread = threading.get_ident()

    def refuse(function: Any, name: str, why: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # other threads of the script go on; a generator with a seed has the same numbers in each pass
            if threading.get_ident() != thread or (name == "default_rng" and (args or kwargs)):
                return function(*args, **kwargs)
            raise CaptureError(f"the forward pass calls {name}, {why}")

        return call

    try:
        for (owner, name, why), function in zip(replaced, was, strict=True):
            setattr(owner, name, refuse(function, name, why))
        yield
    finally:
        for (owner, name, _), function in zip(replaced, was, strict=True):
            setattr(owner, name, function)


def _line(source: _Source, call: Callable[[], object]) -> str:
    """Call again, line by line, and return the line of the caller's code that changes a generator's state."""
    before, lines, found = source.key(), dict[FrameType, int](), list[str]()

    def look(frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        if frame is None or found or source.key() == before:
            return
        file, number = frame.f_code.co_filename, lines.get(frame, frame.f_lineno)
        found.append(f" ({Path(file).name}:{number}: {linecache.getline(file, number).strip()[:_CODE]})")

    def step(frame: FrameType, _event: str, _argument: Any) -> Any:
        look(frame)
        lines[frame] = frame.f_lineno
        return step

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        if found:
            return None
        caller = frame.f_back
        if caller is not None and not caller.f_code.co_filename.startswith(_LIBRARIES):
            look(caller)  # the state may change within a line that goes on to call a function
        if frame.f_code.co_filename.startswith(_LIBRARIES):
            return None
        lines[frame] = frame.f_lineno
        return step

    was = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(was)
    return next(iter(found), "")


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
