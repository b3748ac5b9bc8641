"""A request: its tokens and its text as they are generated, and its finish reason.

Text is decoded incrementally: whole characters, and stop strings held back.
"""

import asyncio
import contextlib
import queue
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from penstock.errors import RunError
from penstock.generate.sampling import Likely, Sampler, ends_of, likeliest, stops_of

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


_BEFORE = 8  # tokens of the prompt with which an answer is decoded, since its first token may begin with a space


class Request:
    """A prompt and its answer, in flight or done; created by `Generator.submit`.

    Iterating yields the tokens as they are generated, `async for` too; `result` returns all of them. `finish_reason` is
    "stop" (an end token, a stop string, or the end of a grammar), "length", "cancelled" or "failed"; None while in
    flight. `logprobs` has the log-probability of each token; `likeliest` lists, for each token, the requested number of
    likeliest tokens with their log-probabilities. If the prompt was scored, `prompt_logprobs` and `prompt_likeliest`
    have the same for its tokens, and None or an empty list for the first token. `num_reused` prompt tokens were found
    in the cache of an earlier request.

    Example:
        request = generator.submit([5, 7, 2], max_new_tokens=10)
        request.result(), request.logprobs, request.finish_reason
    """

    def __init__(
        self,
        prompt: Sequence[int],
        most: int,
        sampler: Sampler,
        config: Any,
        *,
        tokenizer: Any = None,
        num_likeliest: int = 0,
        scored: bool = False,
        start: Sequence[int] = (),
    ) -> None:
        self.prompt = tuple(prompt)
        self.start = tuple(start)  # the decoder's first tokens, if the prompt is for an encoder
        self._num_before = len(self.start or self.prompt)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.likeliest: list[list[tuple[int, float]]] = []
        self.scored = scored
        self.prompt_logprobs: list[float | None] = [None] * len(prompt) if scored else []
        self.prompt_likeliest: list[list[tuple[int, float]]] = [[] for _ in self.prompt_logprobs]
        self.finish_reason: str | None = None
        self.cancelled = False
        self.max_length = self._num_before + most  # most decoder tokens: start or prompt tokens plus the answer
        self.num_reused = 0
        self.asked_s, self.came_s = time.perf_counter(), array("d")  # times of the submission and of each token
        self._num_likeliest = num_likeliest
        self.stops = stops = stops_of(config)
        # special tokens are not part of the decoded text
        special = tokenizer.all_special_tokens if stops else ()
        self._ends = {*ends_of(config), *(tokenizer.convert_tokens_to_ids(stop) for stop in stops if stop in special)}
        self._tokenizer = tokenizer
        self._text = self.decoder() if stops else None
        self._error: BaseException | None = None
        self._news: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._listener: Callable[[], object] | None = None
        self.sample = sampler

    def __iter__(self) -> Iterator[int]:
        """Yield tokens as they are generated; raises the request's error after them."""
        while (token := self._news.get()) is not None:
            yield token
        self._news.put(None)  # for a second iteration
        self._raise()

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        """Yield tokens as they are generated, without a waiting thread."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the reader's event loop is closed
                loop.call_soon_threadsafe(came.set)

        self.listen(wake)
        given = 0
        while True:
            await came.wait()
            came.clear()
            ended = self.finish_reason is not None  # read before the tokens: no token follows the end
            while given < len(self.tokens):
                yield self.tokens[given]
                given += 1
            if ended:
                break
        self._raise()

    def decoder(self, *, continues: bool = True, with_stop: bool = False) -> TextDecoder:
        """Return a decoder of the answer's text, up to a stop string or its end, as it continues the prompt or anew.

        An encoder's prompt is not continued.
        """
        before = self.prompt[-_BEFORE:] if continues and not self.start else ()
        return TextDecoder(self._tokenizer, self.stops, before=before, with_stop=with_stop)

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` now, and in the generator's thread after each token and at the end."""
        self._listener = listener
        self._tell()  # tokens may have arrived before

    def result(self) -> list[int]:
        """Wait for the end and return all tokens; raises the request's error."""
        for _ in self:
            pass
        return list(self.tokens)

    def cancel(self) -> None:
        """Stop generation; the slot is released after the step in flight."""
        self.cancelled = True

    # called by the generator's thread

    def take(self, before: Sequence[int], logits: Tensor, likely: Likely | None = None) -> str | None:
        """Sample the next token; returns the finish reason if it is the last one."""
        token, logprob = self.sample(before, logits, likely)
        self.logprobs.append(logprob)
        if self._num_likeliest:
            self.likeliest.append(likeliest(logits, self._num_likeliest))
        self.tokens.append(token)
        self.came_s.append(time.perf_counter())
        self._news.put(token)
        self._tell()
        if (
            self.sample.ended(token)
            or token in self._ends
            or (self._text is not None and self._stops(self._text, token))
        ):
            return "stop"
        return "length" if self._num_before + len(self.tokens) >= self.max_length else None

    def score(self, index: int, logits: Tensor) -> None:
        """Record the log-probability of a prompt token."""
        self.prompt_logprobs[index] = float(logits.float().log_softmax(-1)[self.prompt[index]])
        if self._num_likeliest:
            self.prompt_likeliest[index] = likeliest(logits, self._num_likeliest)

    def finish(self, reason: str) -> None:
        """End the request."""
        self.finish_reason = reason
        self._news.put(None)
        self._tell()

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        self._error = error
        self.finish("failed")

    def _stops(self, text: TextDecoder, token: int) -> bool:
        text.add(token)
        return text.stopped

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error if isinstance(self._error, RunError) else RunError(str(self._error)) from self._error
