"""Streams: their headers come at once, comments while no token comes, and a full queue is still a status."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from penstock.serve import streams
from penstock.serve.protocol import ApiError
from penstock.serve.streams import Documents
from penstock.serve.texts import Piece, RequestedAnswer
from tests.serve.apps import App, app_fixture

ASK = {"prompt": "A pipe", "max_tokens": 3, "stream": True, "temperature": 0}
HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]

app = app_fixture()


async def pieces(come: asyncio.Event, error: Exception | None = None) -> AsyncGenerator[Piece, None]:
    await come.wait()
    yield Piece(index=0, text="a", num_tokens=1)
    if error is not None:
        raise error
    yield Piece(index=0, finish_reason="stop")


@pytest.mark.parametrize("chat", [True, False])
def test_comments_while_no_token_comes(chat: bool) -> None:
    choices = [RequestedAnswer(index=0, prompt=[1], options={})]

    async def read(error: Exception | None = None) -> list[str]:
        documents, come, found = Documents("small", choices, chat=chat), asyncio.Event(), []
        async for event in streams.events(documents, pieces(come, error), usage=True, keep_alive_s=0.05):
            found.append(event)
            if len(found) == 2:
                come.set()
        return found

    found = asyncio.run(read())
    assert all(event.endswith("\n\n") for event in found)
    assert found[:2] == [": waiting\n\n"] * 2
    data = [json.loads(event.removeprefix("data: ")) for event in found[2:-1] if event[0] != ":"]
    assert data[-1]["usage"]["completion_tokens"] == 1
    assert found[-1] == "data: [DONE]\n\n"
    failed = asyncio.run(read(ApiError("late", status=504)))
    assert json.loads(failed[-1].removeprefix("data: "))["error"]["message"] == "late"


def test_headers_come_while_the_request_waits_for_a_slot(app: App) -> None:
    async def run() -> list[Any]:
        held = app.service.admission.enter("another", 2)
        sent: asyncio.Queue[Any] = asyncio.Queue()
        answer = asyncio.ensure_future(asked(app, sent.put))
        found = [await asyncio.wait_for(sent.get(), 20) for _ in range(2)]
        for ticket in held:
            ticket.leave()
        await asyncio.wait_for(answer, 20)
        while not sent.empty():
            found.append(sent.get_nowait())
        return found

    first, second, *rest = asyncio.run(run())
    assert (first["type"], first["status"], second["body"]) == ("http.response.start", 200, b": waiting\n\n")
    assert b"[DONE]" in b"".join(each["body"] for each in rest)


async def asked(app: App, send: Callable[[Any], Awaitable[None]]) -> None:
    """Send the request and stay; the answer's messages go to `send`."""
    given = iter([{"type": "http.request", "body": json.dumps(ASK).encode()}])

    async def receive() -> Any:
        for message in given:
            return message
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": HEADERS, "query_string": b"",
             "http_version": "1.1", "client": ("a", 1), "root_path": "", "server": ("small", 80)}  # fmt: skip
    await app.app(scope, receive, send)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_client_that_is_gone_holds_no_slot(app: App, number: int) -> None:
    async def run() -> None:
        count = iter(range(100))

        async def send(_message: Any) -> None:
            if next(count) == number:
                raise OSError("gone")

        with contextlib.suppress(Exception):
            await asyncio.wait_for(asked(app, send), 20)
        assert app.service.admission.num_running == app.service.admission.num_waiting == 0

    asyncio.run(run())


def test_full_queue_is_answered_with_429(app: App) -> None:
    answer = app.post("/v1/completions", ASK | {"n": 12})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert app.service.admission.num_waiting == app.service.admission.num_running == 0
