"""A request: its tokens as they come, and how it ended."""

import queue
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import RunError
from penstock.generate.sampling import Sampler, ends_of


class Request:
    """One prompt and its answer, in flight or done; made by `Generator.submit`.

    Iterating gives the tokens as they come, `result` all of them. `finish_reason` says why it ended: "stop" (an end
    token, or a stop string), "length" or "cancelled"; None while it is in flight.

    Example:
        request = generator.submit([5, 7, 2], max_new_tokens=10)
        request.result(), request.logprobs, request.finish_reason
    """

    def __init__(self, prompt: Sequence[int], most: int, sampler: Sampler, config: Any, tokenizer: Any = None) -> None:
        self.prompt = tuple(prompt)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.cancelled = False
        self._most, self._ends = most, frozenset(ends_of(config))
        self._stops = [config.stop_strings] if isinstance(config.stop_strings, str) else list(config.stop_strings or ())
        self._tokenizer = tokenizer
        self._error: BaseException | None = None
        self._news: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.sample = sampler

    def __iter__(self) -> Iterator[int]:
        """Yield tokens as they come; raises what went wrong, after those that came before."""
        while (token := self._news.get()) is not None:
            yield token
        self._news.put(None)  # for whoever looks again
        if self._error is not None:
            raise self._error if isinstance(self._error, RunError) else RunError(str(self._error)) from self._error

    def result(self) -> list[int]:
        """Wait for the end, and return all tokens; raises what went wrong."""
        for _ in self:
            pass
        return list(self.tokens)

    def cancel(self) -> None:
        """Have no more tokens generated: its slot is free after the step in flight."""
        self.cancelled = True

    # called by the generator's thread

    def add(self, token: int, logprob: float) -> str | None:
        """Take a token; returns why it is the last one, if it is."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self._news.put(token)
        if token in self._ends or (self._stops and self._stopped()):
            return "stop"
        return "length" if len(self.tokens) >= self._most else None

    def finish(self, reason: str) -> None:
        """End it."""
        self.finish_reason = reason
        self._news.put(None)

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        self._error = error
        self.finish("failed")

    def _stopped(self) -> bool:
        text = self._tokenizer.decode(self.tokens)
        return any(stop in text for stop in self._stops)
