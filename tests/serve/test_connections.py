"""Connections that wait for their clients: each has a deadline, and gives way to newcomers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from penstock.serve import server

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HALF = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n12345"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer at once, after the body, or with 16 MiB."""
    if scope["method"] == "POST":
        while (await receive())["more_body"]:
            pass
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")] * (scope["path"] == "/")}
    )
    for _ in range(256 * (scope["path"] != "/")):
        await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
    await send({"type": "http.response.body", "body": b"ok" if scope["path"] == "/" else b""})


@asynccontextmanager
async def listening(*, head_s: float = 60.0, reader_s: float = 60.0, most: int = 2048) -> AsyncIterator[int]:
    limits = {"client_s": {"head": head_s, "reader": reader_s}, "most_connections": most}
    kind: Any = type("_Protocol", (server._Protocol,), {"waiting": {}, **limits})
    config, state = uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off"), ServerState()
    made = await asyncio.get_running_loop().create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
    async with made:
        yield made.sockets[0].getsockname()[1]
        for held in list(state.connections):
            held.transport.abort()
        await asyncio.sleep(0.05)
        assert not kind.waiting


async def ask(port: int, *parts: bytes) -> Pair:
    pair = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        pair[1].write(part)
        await pair[1].drain()
        await asyncio.sleep(0.01)
    return pair


async def is_closed(pair: Pair, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            while await pair[0].read(2**16):
                pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "parts",
    [(), (b"G",), (GET[:-2],), (GET, b"G"), (GET, GET[:-2]), (GET, HALF[:-20], b"x"), (b"\r\n",), (GET, b"\r\n"),
     # its body is not read, and neither is it complete
     (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1",),
     (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1",)],
)  # fmt: skip
def test_every_head_has_a_deadline(parts: tuple[bytes, ...]) -> None:
    async def run() -> None:
        async with listening(head_s=0.3) as port:
            held = await ask(port, *parts)
            assert await is_closed(held, 2)
            held[1].close()

    asyncio.run(run())


def test_single_bytes_extend_no_deadline() -> None:
    async def run() -> None:
        async with listening(head_s=0.3) as port:
            _, writer = await ask(port, GET)
            for byte in b"GET /" + b"a" * 200:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)
                if writer.is_closing():
                    break
            else:
                pytest.fail("it is open still")
            writer.close()

    asyncio.run(run())


def test_an_answer_that_is_not_read_has_a_deadline() -> None:
    async def run() -> None:
        async with listening(reader_s=0.3) as port:
            slow, held = (
                await ask(port, GET.replace(b"/", b"/long", 1)),
                await ask(port, GET.replace(b"/", b"/long", 1)),
            )
            for _ in range(20):  # a slow reader is served on
                assert await slow[0].read(2**16)
                await asyncio.sleep(0.05)
            data = await held[0].read()
            assert len(data) < 2**24
            slow[1].close()
            held[1].close()

    asyncio.run(run())


@pytest.mark.parametrize("parts", [(), (GET, b"G"), (HALF,), (GET.replace(b"/", b"/long", 1),), (GET * 50, HALF)])
def test_connections_that_wait_give_way_to_newcomers(parts: tuple[bytes, ...]) -> None:
    async def run() -> None:
        async with listening(most=5) as port:
            held = [await ask(port, *parts) for _ in range(12)]
            reader, writer = await ask(port, GET)
            assert (await reader.read(15)).startswith(b"HTTP/1.1 200")
            assert await is_closed(held[0], 2)
            for _, each in [*held, (reader, writer)]:
                each.close()

    asyncio.run(run())
