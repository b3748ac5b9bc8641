"""Random numbers that a forward pass draws without torch's operators: a graph would draw them once, at its capture."""

import contextlib
import linecache
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.errors import CaptureError

_LIBRARIES = (
    str(Path(torch.__file__).parent), str(Path(np.__file__).parent), str(Path(__file__).parents[1]), random.__file__,
    "<",
)  # fmt: skip
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
