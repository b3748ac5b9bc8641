"""Answers that arrive while the client waits: server-sent events, and the end of a connection."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.serve.admission import Ticket
from penstock.serve.documents import Documents
from penstock.serve.protocol import ApiError
from penstock.serve.texts import Piece

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
