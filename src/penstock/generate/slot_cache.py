"""A cache of transformers for one call, whose layers read and write the slots' states."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.spec.plan import CacheDtype
from penstock.zoo.optional import optional_import

_EXTENDED = {"keys", "values"}
_SCALES, _LARGEST = "_scales", 127  # of keys and values in 8 bits: a scale for each head of a token
_BOTH = "LinearAttentionAndFullAttentionLayer"
_NOTHING = "DummyLayer"
# layers of transformers that keep only keys, values, convolution states and recurrent states
_KNOWN = {
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", _BOTH, _NOTHING,
    "LinearAttentionAndSlidingWindowAttentionLayer",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SlotState:
    """A tensor that a layer keeps for each sequence; each token extends or replaces it."""

    name: str
    shape: tuple[int, ...]  # shape per sequence; for keys and values without the leading length dimension
    dtype: torch.dtype
    extended: bool


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots `rows` [B] that a call uses; it writes at `positions` [B, S] and reads at `places` [T]."""

    rows: Tensor
    positions: Tensor
    places: Tensor


def states_in(cache: Any, model: str) -> list[list[SlotState]]:
    """Return the states that each layer of a transformers cache keeps after a call with one token.

    Raises `UsageError` for a model with a layer that keeps something else.
    """
    found: list[list[SlotState]] = []
    for layer in cache.layers:
        kept: list[SlotState] = []
        for name in sorted(_EXTENDED):
            if (tensor := getattr(layer, name, None)) is not None:
                kept.append(SlotState(name, (tensor.shape[1], tensor.shape[3]), tensor.dtype, extended=True))
        for name in ("conv", "recurrent"):
            for number, tensor in getattr(layer, f"{name}_states", {}).items():
                if tensor is not None:
                    kept.append(SlotState(f"{name}{number}_", tuple(tensor.shape[1:]), tensor.dtype, extended=False))
        found.append(kept)
    while found and not found[-1]:  # a cache may have more layers than the decoder
        found.pop()
    for layer, kept in zip(cache.layers, found, strict=False):
        kind = type(layer).__name__
        if kind not in _KNOWN or not (kept or kind == _NOTHING):
            raise UsageError(
                f"a generator keeps keys and values, convolution and recurrent states; {model} has a layer with "
                f"{'a ' + kind if kept else 'none of them'}; use model.generate"
            )
    if not found:
        raise UsageError(f"{model} keeps nothing in the cache that it is given; use model.generate")
    return found


def kept_as(state: SlotState, cache_dtype: CacheDtype) -> list[SlotState]:
    """Return the states that hold keys or values in another dtype; other states, and integers, stay as they are."""
    if cache_dtype == "model" or not state.extended or not state.dtype.is_floating_point:
        return [state]
    stored = replace(state, dtype=getattr(torch, cache_dtype))
    if cache_dtype != "int8":
        return [stored]
    return [stored, replace(state, name=f"{state.name}{_SCALES}", shape=(*state.shape[:-1], 1))]


def slot_cache(layers: Sequence[Mapping[str, Tensor]], slots: Slots) -> Any:
    """Make the cache of one call from each layer's states by name; keys and values are [slots, T, H, D]."""
    utils = optional_import("transformers.cache_utils", "text")
    extending, replacing = (_layer_class(utils, name) for name in ("CacheLayerMixin", _BOTH))
    names = _EXTENDED | {f"{name}{_SCALES}" for name in _EXTENDED}
    return utils.Cache(layers=[(extending if each.keys() <= names else replacing)(each, slots) for each in layers])


@contextlib.contextmanager
def written_back(model: nn.Module, cache: Any) -> Iterator[None]:
    """Write states that a token replaces back into the slots.

    A layer's states are written after each module whose `layer_idx` is that layer, and once more after the model.
    """

    def hook(index: int) -> Callable[..., None]:
        return lambda *_: cache.layers[index].write_back()

    hooks = []
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index < len(cache.layers):
            hooks.append(module.register_forward_hook(hook(index)))
    try:
        yield
        for layer in cache.layers:
            layer.write_back()
    finally:
        for each in hooks:
            each.remove()


def _layer_class(utils: Any, name: str) -> Any:
    """Make a class of cache layers that models accept as transformers' class of that name."""

    class Layer(getattr(utils, name)):  # type: ignore[misc]
        is_initialized, record_past = True, False

        def __init__(self, states: Mapping[str, Tensor], slots: Slots) -> None:
            self.states, self.slots = states, slots
            self.conv_states = _Replaced("conv", states, slots)
            self.recurrent_states = _Replaced("recurrent", states, slots)
            self.has_previous_state = dict.fromkeys(range(len(states)), True)

        def lazy_initialization(self, *_given: Any, **_named: Any) -> None: ...

        def update(self, keys: Tensor, values: Tensor, *_given: Any, **_named: Any) -> tuple[Tensor, Tensor]:
            return self._extend("keys", keys), self._extend("values", values)

        def _extend(self, name: str, new: Tensor) -> Tensor:
            new, dtype = new.transpose(1, 2), self.states[name].dtype
            if dtype == new.dtype:
                return self._kept(name, new).transpose(1, 2)
            if (scales := self.states.get(f"{name}{_SCALES}")) is None:
                return self._kept(name, new.to(dtype)).to(new.dtype).transpose(1, 2)
            most = new.abs().amax(-1, keepdim=True)
            scale = torch.where(most > 0, most / _LARGEST, 1.0)
            integers = self._kept(name, (new / scale).round().to(torch.int8))
            scale = self._kept(f"{name}{_SCALES}", scale.to(scales.dtype))
            return (integers.to(new.dtype) * scale).transpose(1, 2)

        def _kept(self, name: str, new: Tensor) -> Tensor:
            """Write at this call's positions, and read all of its rows' tokens."""
            rows, places = self.slots.rows, self.slots.places
            self.states[name].index_put_((rows[:, None], self.slots.positions), new)
            # ten times as fast as indexing rows and places, which copies element by element
            return self.states[name].narrow(1, 0, places.shape[0]).index_select(0, rows)

        def update_conv_state(self, new: Tensor, state_idx: int = 0, **_named: Any) -> Tensor:
            old = self.conv_states[state_idx]
            full = torch.cat([old, new], -1)
            self.conv_states.read[state_idx] = full[..., -old.shape[-1] :]
            return full

        def update_recurrent_state(self, new: Tensor, state_idx: int = 0, **_named: Any) -> Tensor:
            self.recurrent_states.read[state_idx] = new
            return new

        def write_back(self) -> None:
            self.conv_states.write_back()
            self.recurrent_states.write_back()

        def get_mask_sizes(self, _query: Any) -> tuple[int, int]:
            return self.slots.places.shape[0], 0

        def get_seq_length(self) -> int:
            return 0

        def get_max_length(self) -> int:
            return self.slots.places.shape[0]

    return Layer


class _Replaced:
    """States of one kind by number, read from the slots on request; the model may modify them in place."""

    def __init__(self, kind: str, states: Mapping[str, Tensor], slots: Slots) -> None:
        self._kind, self._states, self._slots = kind, states, slots
        self.read: dict[int, Tensor] = {}

    def __getitem__(self, number: int) -> Tensor:
        if number not in self.read:
            old = self._states[f"{self._kind}{number}_"].index_select(0, self._slots.rows)
            # a sequence begins with a state of zeros, not with the state that an earlier sequence left in the slot
            begins = (self._slots.positions[:, 0] == 0).reshape(-1, *[1] * (old.dim() - 1))
            self.read[number] = torch.where(begins, torch.zeros((), dtype=old.dtype), old)
        return self.read[number]

    def write_back(self) -> None:
        for number, state in self.read.items():
            self._states[f"{self._kind}{number}_"].index_put_((self._slots.rows,), state)
        self.read.clear()
