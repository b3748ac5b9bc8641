"""Conversion of request bodies to generator requests, and of their tokens to pieces of text."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.errors import DataError, UsageError
from penstock.generate.generator import Generator
from penstock.generate.request import Request, TextDecoder
from penstock.recipes.texts import chat_tokens
from penstock.serve.admission import SMALL_BYTES, Admission, Desk, Ticket, lane_of
from penstock.serve.metrics import Metrics
from penstock.serve.options import (
    JsonGrammar,
    TokenTexts,
    check_tokens,
    json_grammar,
    prompts_of,
    schema_of,
    submit_options,
)
from penstock.serve.protocol import MOST_CHOICES, ApiError, ChatBody, CompletionBody, TokenizeBody, too_long
from penstock.serve.trial import Trial

_MAX_TOKENS = 16  # OpenAI's default for completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token's text, bytes, place in the text and log-probability, and the likeliest alternatives."""

    text: str
    data: bytes
    logprob: float | None
    offset: int = 0
    likeliest: Sequence["Token"] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of a choice and its tokens; the last piece has the finish reason."""

    index: int
    text: str = ""
    tokens: Sequence[Token] = ()
    num_tokens: int = 0
    num_reused: int = 0  # prompt tokens taken from the prefix cache
    finish_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestedAnswer:
    """One requested answer."""

    index: int
    prompt: list[int]
    options: dict[str, Any]
    grammar: JsonGrammar | None = None
    echo: str | None = None  # the prompt's text
    num_likeliest: int | None = None
    unwanted: bool = False  # only the prompt is scored
    stops: frozenset[int] = frozenset()  # tokens that end the answer and are no part of its text
    with_stop: bool = False


class TextService:
    """Submits the choices of a request body to a generator and yields their pieces.

    Example:
        service = TextService(generator, Admission(slots=8, most_waiting=64), Metrics(), deadline_s=600.0)
        choices = await service.completion(CompletionBody(prompt="Once"), "10.0.0.7")
        async for piece in service.pieces(choices, service.enter(choices, "10.0.0.7")):
            ...

    Use it from one event loop. Raises `ApiError`.
    """

    def __init__(
        self, generator: Generator, admission: Admission, metrics: Metrics, *, deadline_s: float, ends: Sequence[int]
    ) -> None:
        """Create the service of a generator; `ends` are the tokens that end an answer."""
        self.generator, self.admission, self.metrics = generator, admission, metrics
        self._deadline_s, self._ends = deadline_s, list(ends)
        self._token_texts = TokenTexts(generator.tokenizer)
        self.desk, self.trial = Desk(admission.most_waiting), Trial(generator.tokenizer)

    @cached_property
    def _most_text(self) -> int:
        """Characters above which a text is longer than the context, whatever its tokens are."""
        longest = max(map(len, self.generator.tokenizer.get_vocab()), default=1)
        return max(SMALL_BYTES, longest * self.generator.max_length)

    async def completion(self, body: CompletionBody, client: str) -> list[RequestedAnswer]:
        """Return the choices of a /v1/completions body."""
        number = body.n or 1
        if body.best_of not in {None, number}:
            raise ApiError(f"best_of must equal n; set it to {number}", param="best_of")
        prompts = prompts_of(body)
        if len(prompts) * number > MOST_CHOICES:
            raise ApiError(f"at most {MOST_CHOICES} answers at a time, not {len(prompts) * number}", param="n")
        most = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if not most and not body.echo:
            raise ApiError("max_tokens must be at least 1 without echo", param="max_tokens")
        self.admission.check_room(len(prompts) * number, retry_s=self.metrics.typical_s)
        choices: list[RequestedAnswer] = []
        for prompt in prompts:
            tokens = await self._tokens(prompt, client)
            choices += self._choices(body, tokens, most, "prompt", len(choices))
            for choice in choices[-number:]:
                choice.options["score_prompt"] = bool(body.echo) and body.logprobs is not None
                choice.unwanted, choice.num_likeliest = not most, body.logprobs
                if body.echo:
                    decode = self.generator.tokenizer.decode
                    choice.echo = prompt if isinstance(prompt, str) else decode(tokens, skip_special_tokens=True)
        return await self._with_grammar(choices, body, client)

    async def chat(self, body: ChatBody, client: str) -> list[RequestedAnswer]:
        """Return the choices of a /v1/chat/completions body."""
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        most = getattr(body, param)
        if most == 0:
            raise ApiError(f"{param} must be at least 1, or -1 for all that fit; got 0", param=param)
        self.admission.check_room(body.n or 1, retry_s=self.metrics.typical_s)
        tokens = await self._chat_tokens(body, client)
        choices = self._choices(body, tokens, -1 if most is None else most, "messages", 0)
        for choice in choices:
            choice.num_likeliest = (body.top_logprobs or 0) if body.logprobs else None
        return await self._with_grammar(choices, body, client)

    async def _with_grammar(
        self, choices: list[RequestedAnswer], body: CompletionBody | ChatBody, client: str
    ) -> list[RequestedAnswer]:
        """Return choices with the grammar of their body, which is built once."""
        if (schema := schema_of(body)) is not None:
            grammar = await self.desk.run(client, "trial", json_grammar, self.generator.tokenizer, schema, self.trial)
            for choice in choices:
                choice.grammar = grammar
        return choices

    def _choices(
        self, body: CompletionBody | ChatBody, tokens: list[int], most: int, param: str, index: int
    ) -> list[RequestedAnswer]:
        """Return the choices of one prompt, from this index on; -1 tokens are all that fit."""
        options = submit_options(body, self.generator, self._ends)
        self._check_length(len(tokens), max(1, most), param)
        options["max_new_tokens"] = self.generator.max_length - len(tokens) if most < 0 else max(1, most)
        return [
            RequestedAnswer(
                index=index + number,
                prompt=tokens,
                options=dict(options),
                stops=frozenset(body.stop_token_ids or ()),
                with_stop=bool(body.include_stop_str_in_output),
            )
            for number in range(body.n or 1)
        ]

    async def tokenize(self, body: TokenizeBody, client: str) -> dict[str, Any]:
        """Return the tokens of a text, or of messages in the model's template, as vLLM does."""
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("prompt or messages must be given, and not both", param="prompt")
        tokenizer, special = self.generator.tokenizer, body.add_special_tokens is not False
        if body.prompt is None:
            tokens = await self._chat_tokens(body, client)
        else:
            tokens = await self._encoded(body.prompt, client, add_special_tokens=special)
        words = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": self.generator.max_length, "tokens": tokens, "token_strs": words}

    async def detokenize(self, tokens: Sequence[int], client: str) -> str:
        """Return the text of tokens."""
        check_tokens(tokens, self.generator.vocabulary, "tokens")
        return str(await self.desk.run(client, lane_of(len(tokens)), self.generator.tokenizer.decode, list(tokens)))

    async def _chat_tokens(self, body: ChatBody | TokenizeBody, client: str) -> list[int]:
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise ApiError(
                "continue_final_message excludes add_generation_prompt; leave one of them out",
                param="continue_final_message",
            )
        begins = not continues and body.add_generation_prompt is not False
        messages = [message.plain() for message in body.messages or ()]
        self._check_text(sum(len(message["content"]) for message in messages), "messages")
        options = body.chat_template_kwargs or {}
        steps = {"add_generation_prompt": begins, "continue_final_message": continues}
        try:
            size = await self.desk.run(client, "trial", self.trial.template, messages, options | steps)
            self._check_text(size, "messages")
            return await self.desk.run(
                client,
                lane_of(size),
                chat_tokens,
                self.generator.tokenizer,
                messages,
                continues=continues,
                begins=begins,
                options=options,
            )
        except DataError as error:
            raise ApiError(f"messages: {error}", param="messages") from None

    async def _encoded(self, text: str, client: str, **options: bool) -> list[int]:
        self._check_text(len(text), "prompt")
        encode = self.generator.tokenizer.encode
        return list(await self.desk.run(client, lane_of(len(text)), encode, text, **options))

    def _check_text(self, num_characters: int, param: str) -> None:
        """Raise `ApiError` for a text that is longer than the context before it is tokenized."""
        if num_characters > self._most_text:
            raise too_long(
                f"the context is {self.generator.max_length} tokens, at most {self._most_text} characters; got "
                f"{num_characters} in {param}; shorten it",
                param,
            )

    def enter(self, choices: Sequence[RequestedAnswer], client: str) -> list[Ticket]:
        """Queue the choices of a client; raises `ApiError` 429 if the queue is full."""
        return self.admission.enter(client, len(choices), retry_s=self.metrics.typical_s)

    async def pieces(
        self, choices: Sequence[RequestedAnswer], tickets: Sequence[Ticket]
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all choices in order of arrival; closing the iterator cancels the requests."""
        news: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._follow(choice, ticket, news))
            for choice, ticket in zip(choices, tickets, strict=True)
        ]
        try:
            left = len(tasks)
            while left:
                piece = await news.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                left -= piece.finish_reason is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for ticket in tickets:
                ticket.leave()

    async def _follow(
        self, choice: RequestedAnswer, ticket: Ticket, news: "asyncio.Queue[Piece | BaseException]"
    ) -> None:
        asked_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._deadline_s), ticket, aclosing(self._answer(choice, asked_s)) as pieces:
                async for piece in pieces:
                    news.put_nowait(piece)
        except TimeoutError:
            self.metrics.ended("deadline", asked_s)
            message = (
                f"no complete answer within {self._deadline_s:g} s, including the wait in the queue; request fewer "
                "tokens, or try again later"
            )
            news.put_nowait(ApiError(message, code="deadline", status=504))
        except asyncio.CancelledError:
            self.metrics.ended("abort", asked_s)
            raise
        except Exception as error:
            self.metrics.ended("error", asked_s)
            news.put_nowait(error)

    async def _answer(self, choice: RequestedAnswer, asked_s: float) -> AsyncGenerator[Piece, None]:
        """Generate one choice; the caller holds a slot."""
        seed = choice.options["seed"]
        try:
            request = self.generator.submit(
                choice.prompt,
                logits_processor=[choice.grammar.copy()] if choice.grammar else (),
                **choice.options | {"seed": None if seed is None else seed + choice.index},
            )
        except UsageError as error:
            raise ApiError(str(error)) from None
        decoder = request.decoder(with_stop=choice.with_stop)
        hidden = frozenset() if choice.with_stop else choice.stops
        given, last_s = 0, asked_s
        try:
            async with aclosing(aiter(request)) as tokens:
                async for token in tokens:
                    now_s = time.perf_counter()
                    self.metrics.token(now_s - last_s, first=not given)
                    last_s = now_s
                    if not given and choice.echo is not None:
                        yield Piece(index=choice.index, text=choice.echo, tokens=self._prompt_tokens(choice, request))
                    given += 1
                    if choice.unwanted:
                        break
                    before = decoder.size
                    text = "" if token in hidden else decoder.add(token)
                    told = self._told(choice, request, given - 1, (before, decoder.size))
                    yield Piece(index=choice.index, text=text, tokens=told, num_tokens=1)
            reason = "length" if choice.unwanted else request.finish_reason
        finally:
            request.cancel()
        self.metrics.ended(reason or "abort", asked_s, num_prompt=len(choice.prompt), num_reused=request.num_reused)
        yield Piece(
            index=choice.index,
            text="" if choice.unwanted else decoder.end(),
            num_reused=request.num_reused,
            finish_reason=reason,
        )

    async def _tokens(self, prompt: str | Sequence[int], client: str) -> list[int]:
        if not isinstance(prompt, str):
            tokens = list(prompt)
            self._check_length(len(tokens), 0, "prompt")
            check_tokens(tokens, self.generator.vocabulary, "prompt")
        else:
            tokenizer, tokens = self.generator.tokenizer, await self._encoded(prompt, client)
            if not tokens and tokenizer.bos_token_id is not None:
                tokens = [tokenizer.bos_token_id]
        if not tokens:
            raise ApiError("prompt must not be empty: this model has no begin-of-text token", param="prompt")
        return tokens

    def _check_length(self, num_prompt: int, most: int, param: str) -> None:
        room = self.generator.max_length
        if num_prompt + most > room:
            raise too_long(
                f"the context is {room} tokens; got {num_prompt} in {param} and {most} for the answer; "
                "shorten one of them",
                param,
            )

    def _token(
        self,
        token: int,
        logprob: float | None,
        likeliest: Sequence[tuple[int, float]] = (),
        sizes: tuple[int, int] = (0, 0),
    ) -> Token:
        """Return what is reported of a token; `sizes` are the characters of the text before and after it."""
        text, data = self._token_texts.text(token), self._token_texts.data(token)
        others = [self._token(other, value) for other, value in likeliest]
        offset = max(sizes[0], sizes[1] - len(text))  # bytes that begin no character become one only now
        return Token(text=text, data=data, logprob=logprob, offset=offset, likeliest=others)

    def _told(self, choice: RequestedAnswer, request: Request, at: int, sizes: tuple[int, int]) -> list[Token]:
        if choice.num_likeliest is None:
            return []
        pairs = request.likeliest[at] if choice.num_likeliest else ()
        begin = len(choice.echo or "")
        sizes = begin + sizes[0], begin + sizes[1]
        return [self._token(request.tokens[at], request.logprobs[at], pairs, sizes)]

    def _prompt_tokens(self, choice: RequestedAnswer, request: Request) -> list[Token]:
        if choice.num_likeliest is None:
            return []
        decoder, found = TextDecoder(self.generator.tokenizer), []
        rows = zip(choice.prompt, request.prompt_logprobs, request.prompt_likeliest, strict=True)
        for token, logprob, pairs in rows:
            before = decoder.size
            decoder.add(token)
            found.append(self._token(token, logprob, pairs, (before, decoder.size)))
        return found
