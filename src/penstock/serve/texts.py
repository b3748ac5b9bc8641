"""Conversion of request bodies to generator requests, and of their tokens to pieces of text."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from penstock.errors import DataError, PenstockError, UsageError
from penstock.generate.generator import Generator
from penstock.generate.request import Request
from penstock.recipes.texts import chat_tokens
from penstock.serve.admission import Admission, Ticket
from penstock.serve.grammar import JsonGrammar
from penstock.serve.metrics import Metrics
from penstock.serve.protocol import MOST_CHOICES, ApiError, ChatBody, CompletionBody, ResponseFormat, too_long

_MAX_TOKENS = 16  # OpenAI's default for completions
_COLDEST = 1e-3  # below this temperature sampling is greedy anyway, and logits / temperature overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token's text and log-probability, and the likeliest alternatives."""

    text: str
    logprob: float | None
    likeliest: Sequence[tuple[str, float]] = ()


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
class Choice:
    """One requested answer."""

    index: int
    prompt: list[int]
    options: dict[str, Any]
    echo: str | None = None  # the prompt's text
    num_likeliest: int | None = None
    unwanted: bool = False  # only the prompt is scored


class TextService:
    """Submits the choices of a request body to a generator and yields their pieces.

    Example:
        service = TextService(generator, Admission(slots=8, most_waiting=64), Metrics(), deadline_s=600.0)
        choices = await service.completion(CompletionBody(prompt="Once"))
        async for piece in service.pieces(choices, "10.0.0.7"):
            ...

    Use it from one event loop. Raises `ApiError`.
    """

    def __init__(self, generator: Generator, admission: Admission, metrics: Metrics, *, deadline_s: float) -> None:
        self.generator, self.admission, self.metrics = generator, admission, metrics
        self._deadline_s = deadline_s
        self._config = generator.model.generation_config

    async def completion(self, body: CompletionBody) -> list[Choice]:
        """Return the choices of a /v1/completions body."""
        number = body.n or 1
        if body.best_of not in {None, number}:
            raise ApiError("best_of must equal n; leave it out", param="best_of")
        prompts = _prompts(body)
        if len(prompts) * number > MOST_CHOICES:
            raise ApiError(f"at most {MOST_CHOICES} answers at a time, not {len(prompts) * number}", param="n")
        options = self._options(body)
        most = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if not most and not body.echo:
            raise ApiError("max_tokens must be at least 1 without echo", param="max_tokens")
        choices: list[Choice] = []
        for prompt in prompts:
            tokens = await self._tokens(prompt)
            own = options | {
                "max_new_tokens": max(1, most),
                "score_prompt": bool(body.echo) and body.logprobs is not None,
            }
            self._check_length(len(tokens), max(1, most), "prompt")
            echo = None
            if body.echo:
                echo = prompt if isinstance(prompt, str) else self.generator.tokenizer.decode(tokens)
            for _ in range(number):
                choices.append(
                    Choice(
                        index=len(choices), prompt=tokens, options=own, echo=echo, unwanted=not most,
                        num_likeliest=body.logprobs,
                    )
                )  # fmt: skip
        return choices

    async def chat(self, body: ChatBody) -> list[Choice]:
        """Return the choices of a /v1/chat/completions body."""
        options = self._options(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        try:
            tokens = await asyncio.to_thread(
                chat_tokens, self.generator.tokenizer, [message.plain() for message in body.messages]
            )
        except PenstockError as error:
            raise ApiError(str(error), param="messages") from None
        most = body.max_completion_tokens or body.max_tokens
        room = self.generator.max_length - len(tokens)
        self._check_length(len(tokens), most or 1, "messages")
        options["max_new_tokens"] = most or room
        number = body.n or 1
        return [
            Choice(
                index=index, prompt=tokens,
                options=options | self._grammar(body.response_format),
                num_likeliest=(body.top_logprobs or 0) if body.logprobs else None,
            )
            for index in range(number)
        ]  # fmt: skip

    async def pieces(self, choices: Sequence[Choice], client: str) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all choices in order of arrival; closing the iterator cancels the requests."""
        tickets = self.admission.enter(client, len(choices), retry_s=self.metrics.typical_s)
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

    async def _follow(self, choice: Choice, ticket: Ticket, news: "asyncio.Queue[Piece | BaseException]") -> None:
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

    async def _answer(self, choice: Choice, asked_s: float) -> AsyncGenerator[Piece, None]:
        """Generate one choice; the caller holds a slot."""
        seed = choice.options["seed"]
        try:
            request = self.generator.submit(
                choice.prompt, **choice.options | {"seed": None if seed is None else seed + choice.index}
            )
        except UsageError as error:
            raise ApiError(str(error)) from None
        decoder = request.decoder()
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
                    told = self._told(choice, request, given - 1)
                    yield Piece(index=choice.index, text=decoder.add(token), tokens=told, num_tokens=1)
            reason = "length" if choice.unwanted else request.finish_reason
        finally:
            request.cancel()
        self.metrics.ended(
            reason or "abort", asked_s, num_prompt=len(choice.prompt), num_reused=request.num_reused
        )  # fmt: skip
        yield Piece(
            index=choice.index, text="" if choice.unwanted else decoder.end(), num_reused=request.num_reused,
            finish_reason=reason,
        )  # fmt: skip

    def _options(self, body: CompletionBody | ChatBody) -> dict[str, Any]:
        """Return the options of `Generator.submit`."""
        config = self._config
        own = config if config.do_sample else None  # the model's recommended sampling
        temperature = body.temperature if body.temperature is not None else getattr(own, "temperature", None) or 1.0
        top_p = body.top_p if body.top_p is not None else getattr(own, "top_p", None)
        top_k = body.top_k if body.top_k is not None else getattr(own, "top_k", None) or 0
        options: dict[str, Any] = {
            "do_sample": temperature >= _COLDEST,
            "temperature": None,
            "top_p": None,
            "top_k": None,
        }
        seed = None
        if temperature >= _COLDEST:
            options |= {"temperature": temperature, "top_p": top_p, "top_k": max(top_k, 0), "min_p": body.min_p}
            seed = body.seed if body.seed is not None else secrets.randbits(62)
        if body.repetition_penalty is not None:
            options["repetition_penalty"] = body.repetition_penalty
        if body.min_tokens:
            options["min_new_tokens"] = body.min_tokens
        if body.ignore_eos:
            options["eos_token_id"] = None
        if body.stop:
            options["stop_strings"] = body.stop
        number = (body.logprobs if isinstance(body, CompletionBody) else body.top_logprobs) or 0
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        if wrong := [token for token in bias if token >= self.generator.vocabulary]:
            raise ApiError(f"logit_bias tokens must be below {self.generator.vocabulary}; got {wrong[0]}",
                           param="logit_bias")  # fmt: skip
        return options | {
            "presence_penalty": body.presence_penalty or 0.0, "frequency_penalty": body.frequency_penalty or 0.0,
            "logit_bias": bias, "num_likeliest": number, "seed": seed,
        }  # fmt: skip

    def _grammar(self, wanted: ResponseFormat | None) -> dict[str, Any]:
        if wanted is None or wanted.type == "text":
            return {}
        schema: dict[str, Any] = {"type": "object"}
        if wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise ApiError("response_format of type 'json_schema' requires the field 'json_schema'",
                               param="response_format")  # fmt: skip
            schema = wanted.json_schema.schema_
        try:
            return {"logits_processor": [JsonGrammar(self.generator.tokenizer, schema)]}
        except DataError as error:
            raise ApiError(f"response_format: {error}", param="response_format") from None

    async def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            tokens, vocabulary = list(prompt), self.generator.vocabulary
            if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
                raise ApiError(f"prompt tokens must be from 0 to {vocabulary - 1}; got {wrong[0]}", param="prompt")
        else:
            tokenizer = self.generator.tokenizer
            tokens = await asyncio.to_thread(lambda: list(tokenizer(prompt)["input_ids"]))
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

    def _text(self, token: int) -> str:
        text: str = self.generator.tokenizer.decode([token])
        return text

    def _token(self, token: int, logprob: float | None, likeliest: Sequence[tuple[int, float]]) -> Token:
        pairs = [(self._text(other), value) for other, value in likeliest]
        return Token(text=self._text(token), logprob=logprob, likeliest=pairs)

    def _told(self, choice: Choice, request: Request, at: int) -> list[Token]:
        if choice.num_likeliest is None:
            return []
        pairs = request.likeliest[at] if choice.num_likeliest else ()
        return [self._token(request.tokens[at], request.logprobs[at], pairs)]

    def _prompt_tokens(self, choice: Choice, request: Request) -> list[Token]:
        if choice.num_likeliest is None:
            return []
        found = zip(choice.prompt, request.prompt_logprobs, request.prompt_likeliest, strict=True)
        return [self._token(token, logprob, pairs) for token, logprob, pairs in found]


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [each for each in prompt if not isinstance(each, int)]
