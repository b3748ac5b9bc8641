"""Texts of single tokens, and decoding of JSON constrained by a schema, with llguidance."""

import json
import re
from collections.abc import Mapping
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.errors import DataError
from penstock.text import one_line
from penstock.zoo.optional import optional_import

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens for bytes of rare characters


class JsonGrammar:
    """A logits processor that allows only tokens that keep the output valid JSON for a schema, and ends with it.

    For one answer; others of the same schema take copies. Raises `DataError` if llguidance rejects the schema or the
    tokenizer.

    Example:
        generator.submit(prompt, logits_processor=[JsonGrammar(tokenizer, {"type": "object"})])
    """

    def __init__(self, tokenizer: Any, schema: Mapping[str, Any]) -> None:
        library = optional_import("llguidance", "serve")
        try:
            vocabulary = _vocabulary(tokenizer)
        except ValueError as error:
            raise DataError(f"JSON is not supported with this model's tokenizer ({one_line(error)})") from None
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)))
        self._matcher = library.LLMatcher(vocabulary, grammar)
        if problem := self._matcher.get_error():
            raise DataError(f"the schema is not supported: {problem.splitlines()[0]}")

    def copy(self) -> "JsonGrammar":
        """Return the grammar at the beginning of another answer."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        """Return scores [1, V] with minus infinity for all other tokens."""
        # 0 for tokens that are not allowed
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        forbidden = torch.ones(scores.shape[-1], dtype=torch.bool)
        forbidden[: len(allowed)] = ~allowed[: len(forbidden)]
        return scores.masked_fill(forbidden, -torch.inf)

    def ends(self, token: int) -> bool:
        """Consume a sampled token; True if none can follow it."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any) -> Any:
    return optional_import("llguidance.hf", "serve").from_tokenizer(tokenizer)


class TokenTexts:
    """Text and bytes of a tokenizer's single tokens, with the space that a token begins with.

    Example:
        TokenTexts(tokenizer).data(7)  # one byte, for a token that is a part of a character
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return a token's text after another token: the first one of a text may lose its space."""
        once, twice = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
        return str(twice[len(once) :] if twice.startswith(once) else once)

    def data(self, token: int) -> bytes:
        """Return a token's own bytes, which need not be whole characters."""
        word = self._tokenizer.convert_ids_to_tokens(token)
        if word is None or token in self._added:
            return self.text(token).encode()
        if self._bytes:
            return bytes(self._bytes[letter] for letter in word if letter in self._bytes)
        found = _BYTE.fullmatch(word)
        return bytes([int(found[1], 16)]) if found else self.text(token).encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """The byte of each letter of a byte-level vocabulary; empty for others."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if "ByteLevel" not in str(getattr(backend, "decoder", None)):
            return {}
        letters = optional_import("transformers.convert_slow_tokenizer", "text").bytes_to_unicode()
        return {letter: byte for byte, letter in letters.items()}
