"""Speculative decoding: idle stages run guesses (draft tokens), made from a sequence's earlier tokens."""

from collections.abc import Sequence

# context lengths, longest first
_SIZES = (4, 2, 1)
# guesses with a context length are used only while its recent hit rate is at least this
_LEAST = 0.5
_WEIGHT = 0.1  # weight of the newest outcome in the moving average of the hit rate


class Guesser:
    """Guesses the next token by prompt lookup: the token that last followed the same context in the sequence.

    The hit rate is tracked even while no guesses are made: every token, beginning with the prompt's, is compared with
    the guess that would have been made. While the rate is low, `guess` returns None.

    Example:
        guesser = Guesser([5, 7, 2, 9, 5, 7, 2])
        guesser.guess([])               # 9, if the hit rate is high enough
        guesser.guess([9])              # 5
        guesser.add(9)

    Source of the algorithm: A. Saxena, Prompt Lookup Decoding, 2023.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._last: list[int] = []  # the newest tokens, as many as the longest context
        self._following: dict[tuple[int, ...], int] = {}
        self._rates = dict.fromkeys(_SIZES, _LEAST)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append the next token."""
        for size in _SIZES:
            if len(self._last) >= size:
                context = tuple(self._last[-size:])
                found = self._following.get(context)
                if found is not None:
                    self._rates[size] += _WEIGHT * ((found == token) - self._rates[size])
                self._following[context] = token
        self._last = [*self._last[1 - _SIZES[0] :], token]

    def guess(self, guessed: Sequence[int]) -> int | None:
        """Return a guess for the position after the earlier guesses, or None."""
        last = [*self._last, *guessed]
        for size in _SIZES:
            found = self._following.get(tuple(last[-size:]))
            if found is not None:
                return found if self._rates[size] >= _LEAST else None
        return None
