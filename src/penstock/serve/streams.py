"""Answers to clients: OpenAI's documents, whole or in chunks, server-sent events, and the end of a connection."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.serve.admission import Ticket
from penstock.serve.protocol import ApiError
from penstock.serve.texts import Piece, RequestedAnswer, Token


class Documents:
    """Builds the response to one request, as a completion or as a chat.

    With `counts_in_chunks` every chunk of a stream has the token counts so far.

    Example:
        documents = Documents("smollm2", choices, chat=True)
        documents.chunk(piece)      # streaming: per piece
        documents.whole(pieces)     # not streaming: once, at the end
    """

    def __init__(
        self, model: str, choices: Sequence[RequestedAnswer], *, chat: bool, counts_in_chunks: bool = False
    ) -> None:
        self._chat, self._choices, self._counts_in_chunks = chat, choices, counts_in_chunks
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._num_tokens = 0
        self._num_reused = [0] * len(choices)

    def begin(self) -> list[dict[str, Any]]:
        """Return the first chunks of a stream."""
        if not self._chat:
            return []
        first = {"role": "assistant", "content": ""}
        return [self._chunk(choice.index, {"delta": first}, None, None) for choice in self._choices]

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Return a piece as a chunk, or None if it is empty."""
        self._count(piece)
        if not piece.text and not piece.tokens and piece.finish_reason is None:
            return None
        logprobs = self._logprobs(piece.index, piece.tokens)
        if not self._chat:
            return self._chunk(piece.index, {"text": piece.text}, logprobs, piece.finish_reason)
        delta = {"content": piece.text} if piece.text or piece.tokens else {}
        return self._chunk(piece.index, {"delta": delta}, logprobs, piece.finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the final chunk with the token counts."""
        return self._head | {"object": self._kind(chunk=True), "choices": [], "usage": self._usage()}

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return all pieces as one response."""
        texts = [""] * len(self._choices)
        tokens: list[list[Token]] = [[] for _ in self._choices]
        reasons: list[str | None] = [None] * len(self._choices)
        for piece in pieces:
            self._count(piece)
            texts[piece.index] += piece.text
            tokens[piece.index] += piece.tokens
            reasons[piece.index] = piece.finish_reason or reasons[piece.index]
        choices = []
        for index, text in enumerate(texts):
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append(
                {
                    "index": index,
                    **({"message": message} if self._chat else {"text": text}),
                    "logprobs": self._logprobs(index, tokens[index]),
                    "finish_reason": reasons[index],
                }
            )
        return self._head | {"object": self._kind(chunk=False), "choices": choices, "usage": self._usage()}

    def _kind(self, *, chunk: bool) -> str:
        if not self._chat:
            return "text_completion"
        return "chat.completion.chunk" if chunk else "chat.completion"

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        counts = {"usage": self._usage()} if self._counts_in_chunks else {}
        return self._head | {"object": self._kind(chunk=True), "choices": [choice], **counts}

    def _count(self, piece: Piece) -> None:
        self._num_tokens += piece.num_tokens
        self._num_reused[piece.index] += piece.num_reused

    def _usage(self) -> dict[str, Any]:
        # each prompt counts once, regardless of n
        prompt = sum({id(choice.prompt): len(choice.prompt) for choice in self._choices}.values())
        first = {id(choice.prompt): choice.index for choice in reversed(self._choices)}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_reused[index] for index in first.values())},
        }

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._choices[index].num_likeliest is None:
            return None
        if self._chat:
            return {"content": [_entry(token) for token in tokens], "refusal": None}
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _entry(token: Token) -> dict[str, Any]:
    own, *others = [
        {"token": each.text, "logprob": each.logprob, "bytes": list(each.data)} for each in (token, *token.likeliest)
    ]
    return own | {"top_logprobs": others}


def _likeliest(token: Token) -> dict[str, float] | None:
    """Return log-probabilities by text, including the token's own; None for the first token of a prompt."""
    found: dict[str, float] = {}
    for each in (*token.likeliest, token):
        if each.logprob is None:
            return None
        found[each.text] = max(each.logprob, found.get(each.text, each.logprob))
    return found


KEEP_ALIVE_S = 1.0  # interval of comments while no token arrives
_Result = TypeVar("_Result")


class Events(StreamingResponse):
    """Server-sent events; at the end of the response their source is closed and its tickets returned."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], headers: Mapping[str, str], tickets: Sequence[Ticket]
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        self._events, self._tickets = events, tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            for ticket in self._tickets:  # a source that never began holds them still
                ticket.leave()


async def events(
    documents: Documents, pieces: AsyncGenerator[Piece, None], *, usage: bool, keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncGenerator[str, None]:
    """Yield the events of an answer, and comments while none arrives, so that proxies keep the connection."""
    begun = False
    async with aclosing(pieces):
        try:
            while True:
                coming = asyncio.ensure_future(anext(pieces))
                try:
                    while not (await asyncio.wait({coming}, timeout=keep_alive_s))[0]:
                        yield ": waiting\n\n"
                    piece = await coming
                finally:
                    await _ended(coming)
                for begin in documents.begin() if not begun else ():
                    yield _event(begin)
                begun = True
                if (chunk := documents.chunk(piece)) is not None:
                    yield _event(chunk)
        except StopAsyncIteration:
            pass
        except PenstockError as error:
            yield _event((error if isinstance(error, ApiError) else ApiError(str(error), status=500)).document())
            return
        if usage:
            yield _event(documents.usage_chunk())
        yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def until_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """Wait for a result; cancel the work if the client disconnects."""
    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return await doing
    finally:
        await _ended(doing)
        await _ended(watching)


async def _ended(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


async def _gone(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return
