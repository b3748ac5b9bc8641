"""Clients of a server: so many at a time, each asks again once it has its answer; what came when, as JSON."""

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from typing import Any

import httpx


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Stream one answer; returns its text and when its tokens came, in seconds after it was asked for."""
    begun, came, text = time.perf_counter(), [], ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            return {"status": response.status_code, "error": (await response.aread()).decode(errors="replace")}
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                if "error" in piece:
                    return {"status": 500, "error": piece["error"]}
                came.append(time.perf_counter() - begun)
                text += piece["choices"][0]["text"]
    return {"status": 200, "text": text, "came_s": came}


async def run(url: str, bodies: list[dict[str, Any]], clients: int) -> dict[str, Any]:
    """Ask for everything."""
    left = deque(enumerate(bodies))
    answers: dict[int, dict[str, Any]] = {}
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def one(client: httpx.AsyncClient) -> None:
        while left:
            number, body = left.popleft()
            asked_s = time.perf_counter() - begun
            answers[number] = await ask(client, body) | {"asked_s": asked_s}

    begun = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=3600.0, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    return {"seconds": time.perf_counter() - begun, "answers": [answers[number] for number in range(len(bodies))]}


def main() -> None:
    """Read bodies from standard input, a JSON document in each line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, required=True)
    given = parser.parse_args()
    bodies = [json.loads(line) for line in sys.stdin]
    print(json.dumps(asyncio.run(run(given.url, bodies, given.clients))))


if __name__ == "__main__":
    main()
