"""Text and bytes of single tokens."""

import re
from functools import cached_property
from typing import Any

from penstock.zoo.optional import optional_import

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens for bytes of rare characters


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
