"""A wrapper of a transformers language model whose KV cache is a buffer.

Slots and positions are graph inputs, so one graph serves prefill and decode.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.deploy.run_options import ModelCall
from penstock.errors import UsageError
from penstock.graph.caches import add_cache
from penstock.graph.capture import fake_parameters
from penstock.spec.plan import Generation
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.weights import PrefixedWeights, Weights

BLOCK = 64  # attended lengths are multiples of this: masked positions beyond a sequence then change no bits
WANTED = 8  # a call returns the logits of at most this many of its tokens
# possible sizes of a prompt's last chunk; the other chunks have the largest
CHUNKS = (WANTED, 16, 32)


class CachedDecoder(nn.Module):
    """Continues several sequences at once, each in a slot of its own.

    A call runs the tokens `ids` [B, S] at `positions` [B, S] of the sequences in the slots `rows` [B], and returns the
    logits [B, K, V] of the tokens at the indices `last` [K] of each. Keys and values are written at `positions` and
    read at `places` [T], which is `arange(T)` for the attended length T. Entries beyond a sequence's own tokens are
    masked, and overwritten later.

        slot, place:   0 1 2 3 4 5 6 7          rows = [0, 2], S = 1
        0              k k k W . . . .          W: written by this call at `positions`
        1              k k . . . . . .          k: written by earlier calls, read for rows up to their position
        2              k k k k k W . .

    `length` is the most tokens of a sequence. Raises `UsageError` for a model that does not work this way.
    """

    def __init__(self, model: Any, *, slots: int, length: int) -> None:
        super().__init__()
        _check(model)
        _check_positions(model, length)
        self.model, self.config = model, model.config
        self.length = -(-length // BLOCK) * BLOCK
        self._sliding = _sliding_window(model.config.get_text_config())
        self._eager = model.config.get_text_config()._attn_implementation == "eager"
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._sizes = _cache_sizes(model)
        room = self.length + 1  # one extra, since torch.export would specialize a slice of the full length
        for index, (heads, key_width, value_width, dtype) in enumerate(self._sizes):
            add_cache(self, f"keys{index}", slots, room, heads, key_width, dtype=dtype)
            add_cache(self, f"values{index}", slots, room, heads, value_width, dtype=dtype)

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor, last: Tensor, places: Tensor) -> Tensor:
        """Run one microbatch."""
        torch._check(places.shape[0] <= self.length)
        layers = [(getattr(self, f"keys{index}"), getattr(self, f"values{index}")) for index in range(len(self._sizes))]
        output = self.model(
            input_ids=ids, position_ids=positions, attention_mask=self._masks(positions, places), use_cache=True,
            past_key_values=_slot_cache(layers, rows, positions, places),
            **({"logits_to_keep": last} if self._selects else {}),
        )  # fmt: skip
        logits: Tensor = output.logits if self._selects else output.logits.index_select(1, last)
        return logits

    def _masks(self, positions: Tensor, places: Tensor) -> Any:
        """Return the attention mask: each token sees all positions up to its own, or the last ones of a window."""
        window, kinds = self._sliding
        own = positions[:, None, :, None]
        full = places <= own
        if window is None:
            return self._as_wanted(full)
        near = self._as_wanted(full & (places > own - window))
        return {kind: near if kind == "sliding_attention" else self._as_wanted(full) for kind in kinds} or near

    def _as_wanted(self, seen: Tensor) -> Tensor:
        if not self._eager:
            return seen
        dtype = self._sizes[0][-1]
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype)
        return torch.where(seen, torch.zeros((), dtype=dtype), hidden)

    def example(self, rows: int, chunk: int) -> dict[str, Tensor]:
        """Return the inputs of the largest call: `rows` sequences, `chunk` tokens each, at the full length."""
        return {
            "ids": torch.zeros(rows, chunk, dtype=torch.int64),
            "positions": torch.arange(chunk).expand(rows, chunk).contiguous(),
            "rows": torch.arange(rows), "last": torch.arange(WANTED), "places": torch.arange(self.length),
        }  # fmt: skip


def decoder_call(model: Any, caches: Generation, weights: Weights | None = None) -> ModelCall:
    """Return the call of a model with caches for `caches.lanes` lanes, to be captured.

    `weights` is a source of tensors under the model's own names; default: the module's tensors. Raises `UsageError` as
    `CachedDecoder`.
    """
    decoder = CachedDecoder(model, slots=caches.slots * caches.lanes, length=caches.max_length).eval()
    return ModelCall(
        model=decoder, kwargs=decoder.example(caches.slots, CHUNKS[-1]), dynamic=DYNAMIC,
        weights=None if weights is None else PrefixedWeights(weights, "model."),
    )  # fmt: skip


# dimensions whose size varies, by symbol: `step` tokens per row, `room` attended positions, `wanted` tokens per row
# whose logits are returned
DYNAMIC: Mapping[str, Mapping[str | int, int]] = {
    "step": {"ids": 1, "positions": 1},
    "room": {"places": 0},
    "wanted": {"last": 0},
}


def _check(model: Any) -> None:
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or not hasattr(model, "generate"):
        raise UsageError(
            f"a generator takes a language model of transformers, not {type(model).__name__}; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{type(model).__name__} has an encoder, whose keys a generator does not keep yet; use a decoder alone"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UsageError(
            f"{type(model).__name__} takes no position_ids, which a batch of sequences of different lengths "
            "needs; use model.generate"
        )


def _check_positions(model: Any, length: int) -> None:
    """Raise `UsageError` if a table of the model has fewer positions than a sequence may have tokens."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or length <= limit:
        return
    # some tables have a few rows more, for padding; others are computed, and end nowhere
    words = model.get_input_embeddings()
    tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    if any(table.dim() and limit <= len(table) <= limit + 2 for table in (*tables, *model.buffers())):
        raise UsageError(
            f"{type(model).__name__} has {limit} positions, but max_length is {length}; use max_length={limit}"
        )


def _sliding_window(config: Any) -> tuple[int | None, tuple[str, ...]]:
    """Return the window, and the kinds of layers that need a mask each; no kinds if one mask serves all layers."""
    window = getattr(config, "sliding_window", None)
    kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    unknown = [kind for kind in kinds if kind not in {"full_attention", "sliding_attention"}]
    if unknown:
        raise UsageError(f"a generator does not support layers of type {unknown[0]}; use model.generate")
    if kinds and "sliding_attention" not in kinds:
        return None, ()
    if not getattr(config, "use_sliding_window", True):
        return None, ()
    return window, kinds if window is not None else ()


def _cache_sizes(model: Any) -> list[tuple[int, int, int, torch.dtype]]:
    """Return heads, widths of keys and values, and dtype for each layer, as the model hands them to a cache."""
    utils = optional_import("transformers.cache_utils", "text")
    found: dict[int, tuple[Tensor, Tensor]] = {}

    class Probe(utils.DynamicCache):  # type: ignore[misc, name-defined]
        def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_given: Any, **_named: Any) -> Any:
            found[layer_idx] = keys, values
            return keys, values

    ids = torch.zeros(1, 1, dtype=torch.int64)
    try:
        with fake_parameters(model), torch.no_grad():
            model(input_ids=ids, position_ids=torch.zeros_like(ids), past_key_values=Probe(), use_cache=True)
    except Exception as error:  # a model may do anything with a cache that it does not know
        raise UsageError(
            f"{type(model).__name__} does not run with a cache of keys and values ({error}); use model.generate"
        ) from error
    number = model.config.get_text_config().num_hidden_layers
    if sorted(found) != list(range(number)):
        raise UsageError(
            f"{type(model).__name__} keeps keys and values for {len(found)} of {number} layers, and something else for "
            "the others; use model.generate"
        )
    return [(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype) for _, (keys, values) in sorted(found.items())]


def _slot_cache(layers: list[tuple[Tensor, Tensor]], rows: Tensor, positions: Tensor, places: Tensor) -> Any:
    """Make transformers' cache of one call, which writes into the slots and reads from them."""
    utils = optional_import("transformers.cache_utils", "text")
    written = rows[:, None], positions

    def read(cache: Tensor) -> Tensor:
        # ten times as fast as indexing rows and places, which copies element by element
        return cache.narrow(1, 0, places.shape[0]).index_select(0, rows).transpose(1, 2)

    class Layer(utils.CacheLayerMixin):  # type: ignore[misc, name-defined]
        is_initialized = True

        def __init__(self, keys: Tensor, values: Tensor) -> None:
            self.keys, self.values = keys, values

        def lazy_initialization(self, *_given: Any) -> None: ...

        def update(self, keys: Tensor, values: Tensor, *_given: Any, **_named: Any) -> tuple[Tensor, Tensor]:
            self.keys.index_put_(written, keys.transpose(1, 2))
            self.values.index_put_(written, values.transpose(1, 2))
            return read(self.keys), read(self.values)

        def get_mask_sizes(self, _query: Any) -> tuple[int, int]:
            return places.shape[0], 0

        def get_seq_length(self) -> int:
            return 0

        def get_max_length(self) -> int:
            return places.shape[0]

    return utils.Cache(layers=[Layer(keys, values) for keys, values in layers])
