"""A wrapper of a transformers language model whose KV cache is a buffer.

Slots and positions are graph inputs, so one graph serves prefill and decode.
"""

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from penstock.deploy.run_options import ModelCall
from penstock.errors import UsageError
from penstock.generate.slots import (
    Slots,
    SlotState,
    kept_as,
    positions_of_rows,
    rotary_limit,
    slot_cache,
    states_in,
    takes_positions,
    written_back,
)
from penstock.graph.capture import fake_parameters
from penstock.graph.decoders import add_cache
from penstock.graph.exporting import EXPORTING
from penstock.spec.plan import CacheDtype, Generation
from penstock.tensors import HOST
from penstock.text import one_line
from penstock.zoo.optional import optional_import
from penstock.zoo.weights.weights import ModuleWeights, RenamedWeights, Weights

BLOCK = 64  # attended lengths are multiples of this: masked positions beyond a sequence then change no bits
WANTED = 8  # a call returns the logits of at most this many of its tokens
_CHUNK, _GPU_CHUNK = 32, 256  # a CPU computes few rows almost as fast as many; a GPU does not, and launches cost time
_SOURCE = "source_"  # names of the keys and values of an encoder's output begin with it
_FAR = 2**40  # beyond any window
# maps indices of batch, head, queries and keys to True if a query sees a key
MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]


class CachedDecoder(nn.Module):
    """Continues several sequences at once, each in a slot of its own.

    A call runs the tokens `ids` [B, S] at `positions` [B, S] of the sequences in the slots `rows` [B], and returns the
    logits [B, K, V] of the tokens at the indices `last` [K] of each. Keys and values are written at `positions` and
    read at `places` [T], which is `arange(T)` for the attended length T. Entries beyond a sequence's own tokens are
    masked, and overwritten later.

        slot, place:   0 1 2 3 4 5 6 7          rows = [0, 2], S = 1
        0              k k k W . . . .          W: written by this call at `positions`
        1              k k . . . . . .          k: written by earlier calls; each row reads those up to its own position
        2              k k k k k W . .

    An encoder runs on the tokens `source` [B, L] and writes the keys and values of its output into the slots; L is 0 in
    later calls. They are read at `source_places` [U], up to `source_sizes` [B].

    A `recurrent` model has some states that each token replaces: S is 1, and rows without a token use an extra dummy
    slot, the last one. A sequence begins at position 0 with states of zeros.

    `length` is the maximum number of tokens per sequence; keys and values are kept in `cache_dtype`. Raises
    `UsageError` for a model that does not work this way.
    """

    def __init__(self, model: Any, *, slots: int, length: int, cache_dtype: CacheDtype = "model") -> None:
        super().__init__()
        _check(model)
        _check_positions(model, length)
        self.model, self.config = model, model.config
        self.length = -(-length // BLOCK) * BLOCK
        self.encodes = bool(getattr(model.config, "is_encoder_decoder", False))
        parameters = inspect.signature(model.forward).parameters
        self._selects = "logits_to_keep" in parameters
        self._takes = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._eager = model.config.get_text_config(decoder=True)._attn_implementation == "eager"
        self._kept = {
            prefix: [[kept for state in layer for kept in kept_as(state, cache_dtype)] for layer in layers]
            for prefix, layers in self._probe().items()
        }
        extends = [state.extended for layers in self._kept.values() for layer in layers for state in layer]
        self.recurrent = not all(extends)
        if any(extends) and not takes_positions(model, length):
            raise UsageError(
                f"{type(model).__name__} cannot give each row its own position (below {length}), as sequences of "
                "different lengths need; use model.generate"
            )
        room = self.length + 1  # one extra, since torch.export would specialize a slice of the full length
        for prefix, layers in self._kept.items():
            for index, layer in enumerate(layers):
                for state in layer:
                    shape = (room, *state.shape) if state.extended else state.shape
                    add_cache(self, f"{prefix}{state.name}{index}", slots + self.recurrent, *shape, dtype=state.dtype)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        last: Tensor,
        places: Tensor,
        source: Tensor | None = None,
        source_sizes: Tensor | None = None,
        source_places: Tensor | None = None,
    ) -> Tensor:
        """Run one microbatch."""
        torch._check(places.shape[0] <= self.length)
        caches = [self._cache("", Slots(rows, positions, places))]
        given: dict[str, Any] = {}
        if source is not None and source_sizes is not None and source_places is not None:
            torch._check(source_places.shape[0] <= self.length)
            torch._check(source.shape[1] <= self.length)
            written = torch.arange(source.shape[1]).expand(source.shape)
            caches.append(self._cache(_SOURCE, Slots(rows, written, source_places)))
            given = self._encoded(source, source_sizes, source_places, ids.shape[1])
        with masks_by(lambda function: mask_of_rows(function, positions, places)), written_back(self.model, caches[0]):
            return self._run(caches, ids, positions, last, places, given)

    def _run(
        self,
        caches: Sequence[Any],
        ids: Tensor,
        positions: Tensor,
        last: Tensor,
        places: Tensor,
        given: Mapping[str, Any],
    ) -> Tensor:
        utils = optional_import("transformers.cache_utils", "text")
        with positions_of_rows(self.model, positions, places) as positioned:
            output = self.model(
                **{
                    "decoder_input_ids" if self.encodes else "input_ids": ids,
                    "use_cache": True,
                    self._takes: utils.EncoderDecoderCache(*caches) if self.encodes else caches[0],
                    **positioned,
                    **given,
                    **({"logits_to_keep": last} if self._selects else {}),
                }
            )
        logits: Tensor = output.logits if self._selects else output.logits.index_select(1, last)
        return logits

    def _encoded(self, source: Tensor, sizes: Tensor, places: Tensor, num_queries: int) -> dict[str, Any]:
        """Run the encoder; returns its output and the mask with which the decoder attends to it."""
        own, encoder = torch.arange(source.shape[1]), self.model.get_encoder()
        seen = own < sizes[:, None]
        with masks_by(lambda function: mask_of_rows(function, own.expand(source.shape), own) & seen[:, None, None, :]):
            output = encoder(input_ids=source, attention_mask=seen.to(torch.int64))
        read = (places < sizes[:, None, None, None]).expand(source.shape[0], 1, num_queries, places.shape[0])
        return {"encoder_outputs": output, "attention_mask": self._as_wanted(read)}

    def _as_wanted(self, seen: Tensor) -> Tensor:
        return as_added(seen, self.model.dtype) if self._eager else seen

    def _cache(self, prefix: str, slots: Slots) -> Any:
        """Make the cache of one call, for the decoder's own states or for keys and values of the encoder's output."""
        return slot_cache(
            [
                {state.name: getattr(self, f"{prefix}{state.name}{index}") for state in layer}
                for index, layer in enumerate(self._kept[prefix])
            ],
            slots,
        )

    def _probe(self) -> dict[str, list[list[SlotState]]]:
        """Run one token, and return the states that each layer keeps, for the decoder and for the encoder's output."""
        utils = optional_import("transformers.cache_utils", "text")
        name, one = type(self.model).__name__, torch.zeros(1, 1, dtype=torch.int64)

        functions: list[MaskFunction] = []

        def mask(function: MaskFunction) -> Tensor:
            functions.append(function)
            return torch.ones(1, 1, 1, 1, dtype=torch.bool)

        decoder = (self.model.get_decoder() if self.encodes else self.model).config.get_text_config(decoder=True)
        caches = {prefix: utils.DynamicCache(config=decoder) for prefix in ("", *([_SOURCE] if self.encodes else []))}
        try:
            with fake_parameters(self.model), torch.no_grad(), masks_by(mask):
                given = self._encoded(one, one[0] + 1, one[0], 1) if self.encodes else {}
                self._run(list(caches.values()), one, one, one[0], one[0], given)
        except Exception as error:  # a model may do anything with a cache of an unknown kind
            raise UsageError(
                f"{name} does not run with a cache of transformers ({one_line(error)}); use model.generate"
            ) from error
        kept = {prefix: states_in(cache, name) for prefix, cache in caches.items()}
        if any(state.extended for layer in kept[""] for state in layer):
            if not any(map(is_causal, functions)):
                raise UsageError(f"{name} asks transformers for no causal mask; load it with is_decoder=True")
            if any(caches[""].is_sliding) and all(map(sees_everything, functions)):
                raise UsageError(f"{name} has a sliding window in its cache and none in its masks; use model.generate")
        return kept

    @property
    def dynamic(self) -> dict[str, dict[str | int, int]]:
        """Dimensions of inputs that may differ in size from the example's."""
        found: dict[str, dict[str | int, int]] = {"room": {"places": 0}}
        if not self.recurrent:
            found |= {"step": {"ids": 1, "positions": 1}, "wanted": {"last": 0}}
        if self.encodes:
            found |= {"source": {"source": 1}, "source_room": {"source_places": 0}}
        return found

    @property
    def largest(self) -> dict[str, int]:
        """Return the largest sizes that `forward` takes."""
        return dict.fromkeys(("room", "source", "source_room") if self.encodes else ("room",), self.length)

    def example(self, rows: int, chunk: int) -> dict[str, Tensor]:
        """Return the inputs of the largest call: `rows` sequences, `chunk` tokens each, at the full length."""
        chunk = 1 if self.recurrent else chunk
        found = {
            "ids": torch.zeros(rows, chunk, dtype=torch.int64),
            "positions": torch.arange(chunk).expand(rows, chunk).contiguous(),
            "rows": torch.arange(rows),
            "last": torch.arange(min(chunk, WANTED)),
            "places": torch.arange(self.length),
        }
        if self.encodes:
            source = torch.zeros(rows, self.length, dtype=torch.int64)
            found |= {"source": source, "source_sizes": source[:, 0] + 1, "source_places": torch.arange(self.length)}
        return found


def chunk_on(device: str, length: int) -> int:
    """Return the size of a prompt's chunks on a device, for sequences up to a length.

    >>> chunk_on("cpu", 512), chunk_on("cuda", 512), chunk_on("cuda:1", 100)
    (32, 256, 128)
    """
    return _CHUNK if device == HOST.type else min(_GPU_CHUNK, -(-length // BLOCK) * BLOCK)


def chunk_sizes(largest: int) -> list[int]:
    """Return the possible sizes of a prompt's last chunk; the others have the largest.

    >>> chunk_sizes(32)
    [8, 16, 32]
    """
    return [*takewhile(lambda size: size < largest, (WANTED << doubled for doubled in count())), largest]


def decoder_call(model: Any, caches: Generation, weights: Weights | None = None) -> ModelCall:
    """Return the call of a model with caches for `caches.lanes` lanes, to be captured.

    `weights` is a source of tensors under the model's own names; default: the module's tensors. Raises `UsageError`
    like `CachedDecoder`.
    """
    if (host := _on_host(model)) is not model:
        weights = weights or ModuleWeights(model)
    slots = caches.slots * caches.lanes
    if weights is not None:
        weights = RenamedWeights(weights, {f"model.{name}": name for name in weights.names()})
    decoder = CachedDecoder(host, slots=slots, length=caches.max_length, cache_dtype=caches.cache_dtype).eval()
    return ModelCall(
        model=decoder,
        kwargs=decoder.example(caches.slots, caches.chunk),
        dynamic=decoder.dynamic,
        largest=decoder.largest,
        weights=weights,
    )


def _on_host(model: Any) -> Any:
    """Return the model; for a model on a GPU, a copy on the CPU without parameter values, to be captured."""
    _check(model)
    if all(tensor.device.type in {"cpu", "meta"} for tensor in (*model.parameters(), *model.buffers())):
        return model
    moved: dict[int, Tensor] = {id(buffer): buffer.cpu() for buffer in model.buffers()}
    for parameter in model.parameters():
        moved[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return copy.deepcopy(model, moved)


def _check(model: Any) -> None:
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or not hasattr(model, "generate"):
        raise UsageError(
            f"a generator takes a language model of transformers, not {type(model).__name__}; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )
    if hasattr(model, "merge_and_unload"):
        raise UsageError(f"a generator takes no {type(model).__name__} with adapters; give model.merge_and_unload()")
    if getattr(model, "is_quantized", False) and getattr(model, "quantization_method", "gguf") != "gguf":
        raise UsageError(
            f"{type(model).__name__} has quantized layers, which a generator cannot run; load it without "
            "quantization_config, and use runtime='onnxruntime:int8'"
        )


def _check_positions(model: Any, length: int) -> None:
    """Raise `UsageError` if positions below `length` have no table, or factors that depend on other sequences."""
    limit = rotary_limit(model)
    if limit is not None and length > limit:
        raise UsageError(
            f"{type(model).__name__} chooses its rotary factors by the longest sequence of a call beyond {limit} "
            f"tokens, so a request's tokens would depend on others; use max_length={limit}, or model.generate"
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or length <= limit:
        return
    # some tables have a few extra rows for padding; positions that are computed have no limit
    words = model.get_input_embeddings()
    tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    if any(table.dim() and limit <= len(table) <= limit + 2 for table in (*tables, *model.buffers())):
        raise UsageError(
            f"{type(model).__name__} has {limit} positions, but max_length is {length}; use max_length={limit}"
        )


@contextlib.contextmanager
def masks_by(make: Callable[[MaskFunction], Tensor]) -> Iterator[None]:
    """In this thread, replace the masks of transformers' models by those that `make` returns.

    The argument of `make` is the kind of mask as a function of indices: causal, with a sliding window, in chunks.
    """
    interfaces = optional_import("transformers.masking_utils", "text").ALL_MASK_ATTENTION_FUNCTIONS
    owner = threading.get_ident()

    def replaced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, mask_function: MaskFunction, **named: Any) -> Any:
            if threading.get_ident() != owner:
                return original(*args, mask_function=mask_function, **named)
            seen = make(mask_function)
            return as_added(seen, named.get("dtype", torch.float32)) if name == "eager" else seen

        return made

    with EXPORTING:
        originals = {name: interfaces[name] for name in interfaces}
        try:
            for name, original in originals.items():
                interfaces[name] = replaced(name, original)
            yield
        finally:
            for name, original in originals.items():
                interfaces[name] = original


def mask_of_rows(function: MaskFunction, positions: Tensor, places: Tensor) -> Tensor:
    """Return the mask [B, 1, S, T] of queries at `positions` [B, S] and keys at `places` [T]."""
    rows = torch.arange(positions.shape[0])[:, None, None, None]
    return function(rows, torch.zeros((), dtype=torch.int64), positions[:, None, :, None], places)


def is_causal(function: MaskFunction) -> bool:
    """Return whether a token does not attend to the token after it."""
    return not _sees(function, 0, 1)


def sees_everything(function: MaskFunction) -> bool:
    """Return whether a token attends to all tokens before it, however far."""
    return _sees(function, _FAR, 0)


def _sees(function: MaskFunction, query: int, key: int) -> bool:
    zero = torch.zeros(1, dtype=torch.int64)
    return bool(function(zero, zero, zero + query, zero + key).any())


def as_added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to one that is added to scores."""
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype)
    return torch.where(seen, torch.zeros((), dtype=dtype), hidden)
