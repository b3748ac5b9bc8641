"""Requests that ask for much, at their real sizes, beside a client that asks for /health and a short answer."""

import asyncio
import contextlib
import io
import json
import socket
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import psutil
from PIL import Image

from tests.serve.servers import Server, serving

_PAUSE_S = 0.1
_SETTLED_S = 3.0
_CLASSIFIER = "timm:vit_tiny_patch16_224,img_size=32,patch_size=8,depth=2,num_classes=4"
Ask = Callable[[httpx.AsyncClient], Any]
Send = Callable[[httpx.AsyncClient], AbstractAsyncContextManager[list[int]]]


def odd(folder: Path) -> list[dict[str, Any]]:
    """Send each request to a server of its kind; returns its statuses, the worst wait beside it, and memory."""
    rows = []
    with serving(f"hf:{folder}", "--open", "--stages", 1, "--max-length", 128) as server:
        for name, number, path, body in _texts():
            rows.append(asyncio.run(_row(server, name, _posts(path, body, number, "application/json"), _short_text)))
        rows.append(asyncio.run(_row(server, "2,048 half requests", _held_open(server.url), _short_text)))
    small = io.BytesIO()
    Image.new("RGB", (32, 32)).save(small, "PNG")
    with serving(_CLASSIFIER, "--open", "--stages", 1) as server:
        for name, number, data in _images():
            asks = _posts("/v1/classify", data, number, "image/png")
            rows.append(asyncio.run(_row(server, name, asks, _short_image(small.getvalue()))))
    return rows


def _texts() -> Iterator[tuple[str, int, str, bytes]]:
    """Return the name, number, path and body of each request for text."""
    many = 975_000
    enum = {"enum": [f"value {number}" for number in range(20_000)]}
    pattern = {"type": "string", "pattern": "(a|b)*c" * 14_000}
    bodies: list[tuple[str, int, dict[str, Any]]] = [
        ("3.9 MB of tokens -1", 1, {"prompt": [-1] * many}),
        ("3.9 MB of text", 4, {"prompt": "hey " * many}),
        ("an enum of 20,000, n 128", 1, _constrained(enum) | {"n": 128}),
        ("a pattern of 98 kB", 1, _constrained(pattern)),
    ]
    for name, number, body in bodies:
        yield name, number, "/v1/completions", json.dumps(body, separators=(",", ":")).encode()


def _constrained(schema: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "A pipe", "max_tokens": 2, "response_format": {"type": "json_object", "schema": schema}}


def _images() -> Iterator[tuple[str, int, bytes]]:
    """Return the name, number and bytes of each image."""
    for width, height in ((1, 16_000), (1, 30_000), (1, 2**26)):
        yield f"a PNG of {width} x {height}", 1, _png(width, height, 0)
    yield "12 PNGs of 8192 x 8192", 12, _png(8192, 8192, 2)
    yield "an RGBA PNG of 8192 x 8192", 1, _png(8192, 8192, 6)


def _png(width: int, height: int, color: int) -> bytes:
    """Write a black image of a PNG color type, row by row."""
    row = bytes(1 + width * {0: 1, 2: 3, 6: 4}[color])
    packer = zlib.compressobj(1)
    data = b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part)) for kind, part in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _posts(path: str, body: bytes, number: int, kind: str) -> Send:
    @contextlib.asynccontextmanager
    async def send(client: httpx.AsyncClient) -> AsyncIterator[list[int]]:
        asked = [client.post(path, content=body, headers={"Content-Type": kind}) for _ in range(number)]
        yield sorted(answer.status_code for answer in await asyncio.gather(*asked))

    return send


def _held_open(url: str) -> Send:
    @contextlib.asynccontextmanager
    async def hold(_: httpx.AsyncClient) -> AsyncIterator[list[int]]:
        place, held = urlparse(url), []

        def connect() -> None:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((place.hostname or "", place.port or 0), timeout=1.0))
                held[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nG")

        for _number in range(2048):
            await asyncio.to_thread(connect)
        await asyncio.sleep(3.0)
        yield []
        for each in held:
            each.close()

    return hold


async def _short_text(client: httpx.AsyncClient) -> int:
    return (await client.post("/v1/completions", json={"prompt": "A pipe", "max_tokens": 2})).status_code


def _short_image(data: bytes) -> Ask:
    async def ask(client: httpx.AsyncClient) -> int:
        return (await client.post("/v1/classify", content=data, headers={"Content-Type": "image/png"})).status_code

    return ask


async def _row(server: Server, name: str, asks: Send, short: Ask) -> dict[str, Any]:
    """Send requests, and ask for /health and a short answer until they have ended."""
    before = peak = _held(server)
    worst_s, wrong = 0.0, 0
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as client:
        for _ in range(3):
            await short(client)

        async def send() -> list[int]:
            async with asks(client) as statuses:
                return list(statuses)

        sent = asyncio.create_task(send())
        begun_s = time.perf_counter()
        while not sent.done():
            async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as other:  # a newcomer each time
                asked_s = time.perf_counter()
                try:
                    statuses = [(await other.get("/health")).status_code, await short(other)]
                except httpx.TransportError:
                    statuses = [0]
            worst_s = max(worst_s, time.perf_counter() - asked_s)
            wrong += any(status != 200 for status in statuses)
            peak = max(peak, _held(server))
            await asyncio.sleep(_PAUSE_S)
        seconds = time.perf_counter() - begun_s
        statuses = await sent
    await asyncio.sleep(_SETTLED_S)
    return {
        "request": name, "statuses": sorted(set(statuses)), "seconds": round(seconds, 1), "worst_s": round(worst_s, 2),
        "unanswered": wrong, "peak_mb": round((peak - before) / 1e6), "after_mb": round((_held(server) - before) / 1e6),
    }  # fmt: skip


def _held(server: Server) -> int:
    """Return the resident bytes of a server with its processes."""
    total = 0
    for each in [psutil.Process(server.running.pid), *psutil.Process(server.running.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += each.memory_info().rss
    return total
