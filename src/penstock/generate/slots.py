"""Slots of a decoder: a cache of transformers for one call, whose layers use the slots' states, and positions by row.

Models whose `forward` takes no positions derive them from the cache's length; they get those of the rows instead.
"""

import contextlib
import inspect
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
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    _BOTH,
    _NOTHING,
    "LinearAttentionAndSlidingWindowAttentionLayer",
}


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


# a model with this method has positions in its attention masks only
_ALIBI = "build_alibi_tensor"
_OFFSET = "get_query_offset"


def takes_positions(model: nn.Module, length: int) -> bool:
    """Return whether each row of a model's batch may be at a position of its own, below `length`."""
    for module in model.modules():
        # attention that derives positions from the cache's length; Llama 4 scales attention by the position, but only
        # from position `floor_scale` upwards
        if _OFFSET in inspect.unwrap(type(module).forward).__code__.co_names:
            return False
        if getattr(module, "attn_temperature_tuning", False) and length > getattr(module, "floor_scale", length):
            return False
    in_masks = any(hasattr(each, _ALIBI) for each in model.modules())
    return in_masks or _named(model) is not None or bool(_places_of_positions(model))


def rotary_limit(model: nn.Module) -> int | None:
    """Return the sequence length beyond which rotary factors depend on the longest sequence of a call, if any.

    Dynamic NTK and LongRoPE choose the factors of all rows by the largest position. Up to the length of pretraining
    they are constant; `positions_of_rows` then leaves the choice out.
    """
    limits = [
        limit
        for module in model.modules()
        for kind, parameters in _rotary(module)
        if (
            limit := parameters.get("original_max_position_embeddings")
            if kind == "longrope"
            else getattr(module, "original_max_seq_len", None)
        )
        is not None
    ]
    return min(limits, default=None)


def _rotary(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the kinds of a rotary embedding's factors that depend on the length of a call, with their parameters."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    given = getattr(config, "rope_parameters", None) or {}
    for layer, kind in kinds.items() if isinstance(kinds, Mapping) else ((None, kinds),):
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
            yield kind, given if layer is None else given.get(layer, {})


@contextlib.contextmanager
def _fixed_rotary(model: nn.Module) -> Iterator[None]:
    """Keep rotary factors that depend on the length of a call at those of short sequences."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if any(True for _ in _rotary(module)):
                kinds: Any = module.rope_type
                fixed = dict.fromkeys(kinds, "default") if isinstance(kinds, Mapping) else "default"
                stack.enter_context(_replaced(module, "rope_type", fixed))
        yield


@contextlib.contextmanager
def positions_of_rows(model: Any, positions: Tensor, places: Tensor) -> Iterator[dict[str, Tensor]]:
    """Run a model at `positions` [B, S] with keys at `places` [T]; yields extra arguments for the call of the model."""
    with _fixed_rotary(model), _masks_of_rows(model, positions, places), _positioned(model, positions, places) as given:
        yield given


class _MaskOfRows:
    """The causal mask of an attention that slices it by the number of keys; with a `window`, of the keys within it."""

    def __init__(self, positions: Tensor, places: Tensor, window: int | None) -> None:
        distance = positions[:, None, :, None] - places
        self._seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def __getitem__(self, _slices: Any) -> Tensor:
        return self._seen


@contextlib.contextmanager
def _masks_of_rows(model: nn.Module, positions: Tensor, places: Tensor) -> Iterator[None]:
    """Replace masks that attentions slice by the number of keys, which is rounded up here, as in GPT-Neo."""
    found = [each for each in model.modules() if getattr(each, "attention_type", None) in {"global", "local"}]
    found = [each for each in found if "bias" in each._buffers and hasattr(each.config, "window_size")]
    for each in found:  # hides the buffer of this name
        config: Any = each.config
        window = config.window_size if each.attention_type == "local" else None
        vars(each)["bias"] = _MaskOfRows(positions, places, window)
    try:
        yield
    finally:
        for each in found:
            del vars(each)["bias"]


@contextlib.contextmanager
def _positioned(model: Any, positions: Tensor, places: Tensor) -> Iterator[dict[str, Tensor]]:
    if getattr(model.config, "alibi", False):  # biases are made from a mask
        yield {"attention_mask": torch.ones(positions.shape[0], places.shape[0], dtype=torch.int64)}
        return
    if name := _named(model):
        yield {name: positions}
        return
    with contextlib.ExitStack() as stack:
        for module, name, make in _places_of_positions(model):
            given = places if make is _alibi else positions
            stack.enter_context(_replaced(module, name, make(getattr(module, name), given)))
        yield {}


def _named(model: nn.Module) -> str | None:
    """Return the name of the argument with the positions of the decoder's tokens, if the model takes one."""
    name = "decoder_position_ids" if getattr(model.config, "is_encoder_decoder", False) else "position_ids"
    return name if name in inspect.signature(model.forward).parameters else None


def _places_of_positions(model: Any) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
    """Return each module that derives positions from a length, the name of its method, and what makes a replacement."""
    decoder = model.get_decoder()
    found: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    for module in decoder.modules() if isinstance(decoder, nn.Module) else ():
        if {"past_key_values_length", "position_ids"} <= inspect.signature(module.forward).parameters.keys():
            found.append((module, "forward", _embedding))
        elif "past_seen_tokens" in _parameters(module, "compute_bias"):
            found.append((module, "compute_bias", _bias))
        elif "past_key_values_length" in _parameters(module, "create_position_ids_from_input_ids"):
            found.append((module, "create_position_ids_from_input_ids", _numbers))
        elif hasattr(module, "build_mpt_alibi_tensor"):
            found.append((module, "build_mpt_alibi_tensor", _alibi))
    return found


def _parameters(module: nn.Module, name: str) -> tuple[str, ...]:
    method = getattr(module, name, None)
    return tuple(inspect.signature(method).parameters) if callable(method) else ()


def _embedding(original: Callable[..., Tensor], positions: Tensor) -> Callable[..., Tensor]:
    """Replace the forward of a position embedding."""

    def embed(given: Any, *_args: Any, **_named: Any) -> Tensor:
        return original(given, 0, position_ids=positions.flatten()).reshape(*positions.shape, -1)

    return embed


def _numbers(_original: Callable[..., Tensor], positions: Tensor) -> Callable[..., Tensor]:
    """Replace the position ids of an embedding whose ids start at padding_idx + 1."""

    def number(ids: Tensor, padding: int, *_args: Any, **_named: Any) -> Tensor:
        return torch.where(ids == padding, padding, positions + padding + 1)

    return number


def _bias(original: Callable[..., Tensor], positions: Tensor) -> Callable[..., Tensor]:
    """Replace the relative position bias [1, H, S, T] by one for each row [B, H, S, T]."""

    def compute_bias(_query_length: int, key_length: int, device: Any = None, **_named: Any) -> Tensor:
        # compute the positions as one long row: [1, H, B * S, T]
        found = original(1, key_length, device=device, past_seen_tokens=positions.reshape(-1, 1))
        biases: Tensor = found[0].unflatten(1, positions.shape).transpose(0, 1)
        return biases

    return compute_bias


def _alibi(original: Callable[..., Tensor], places: Tensor) -> Callable[..., Tensor]:
    """Replace biases [H, 1, T] that count back from the last key by biases that do not depend on the number of keys."""

    def build(num_heads: int, *_args: Any, **_named: Any) -> Tensor:
        slopes: Tensor = -original(num_heads, 2)[..., :1]
        return slopes * places

    return build


@contextlib.contextmanager
def _replaced(module: nn.Module, name: str, value: object) -> Iterator[None]:
    own = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name)
        if own is not None:
            setattr(module, name, own)
