"""Incremental detokenization: whole characters, and stop strings held back."""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # decoded from an incomplete character


class TextDecoder:
    """Decodes an answer token by token, in constant time per token.

    A few tokens before the new one are decoded again with it, since a tokenizer writes a token differently at the start
    of a text. Text that may be the beginning of a stop string is held back until that is ruled out; a stop string and
    the text after it are left out, or with `with_stop` only that text. `size` is the number of characters so far, up
    to an incomplete one.

    Example:
        decoder = TextDecoder(tokenizer, stops=["\n\n"])
        for token in request:
            print(decoder.add(token), end="")
        print(decoder.end())
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), *, before: Sequence[int] = (), with_stop: bool = False
    ) -> None:
        """Create a decoder; `before` are the prompt's last tokens, for a text that continues them."""
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._tokens = list(before)
        #     tokens:   . . . . | a b | c        decode(a b c) minus decode(a b) is the text of c
        #                       ^     ^
        #                    shown  known
        self._shown, self._known = 0, len(self._tokens)
        self._held, self._with_stop = "", with_stop
        self.stopped = False
        self.size = self._num_taken = 0

    def add(self, token: int) -> str:
        """Append a token, and return the text that is now certain."""
        self._tokens.append(token)
        new = self._decode_new()
        if self.stopped or new.endswith(_UNFINISHED):
            self.size = self._num_taken + max(0, len(new) - 1)
            return ""
        return self._take(new)

    def end(self) -> str:
        """Return the text that was held back; no token follows."""
        if self.stopped:
            return ""
        rest = self._take(self._decode_new())
        held, self._held = self._held, ""
        return rest + ("" if self.stopped else held)

    def _decode_new(self) -> str:
        known = self._decode(self._tokens[self._shown : self._known])
        return self._decode(self._tokens[self._shown :])[len(known) :]

    def _take(self, new: str) -> str:
        """Append decoded text, and return the part that cannot belong to a stop string."""
        if new:
            self._shown, self._known = self._known, len(self._tokens)
        self._held += new
        self._num_taken += len(new)
        self.size = self._num_taken
        found = [(at, len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            begin, length = min(found)
            certain, self._held = self._held[: begin + length * self._with_stop], ""
            return certain
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return certain

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text begin the stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
