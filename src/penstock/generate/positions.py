"""Positions by row for models whose `forward` takes none: their modules derive positions from the cache's length."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
        limit for module in model.modules() for kind, parameters in _rotary(module)
        if (limit := parameters.get("original_max_position_embeddings") if kind == "longrope"
            else getattr(module, "original_max_seq_len", None)) is not None
    ]  # fmt: skip
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
