"""Positions by row for models whose `forward` takes none: their modules derive positions from the cache's length."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def positions_of_rows(model: Any, positions: Tensor, places: Tensor) -> Iterator[dict[str, Tensor]]:
    """Run a model at `positions` [B, S] with keys at `places` [T]; yields extra arguments for the call of the model."""
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
