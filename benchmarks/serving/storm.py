"""Thousands of requests, some given up in the middle, some malformed, while processes are killed."""

import asyncio
import json
import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.serving.load import ask
from tests.serve.servers import Server, serving

_KINDS = 200  # of requests
_CLIENTS = 64
_KEPT_S = 10.0  # idle connections are closed by then
_LOST_AT = (0.3, 0.6)  # of the requests, a process that holds a stage is killed


def storm(folder: Path, number: int) -> dict[str, Any]:
    """Ask every kind of request alone, then so many at random; returns what was lost or different."""
    words = (f"hf:{folder}", "--open", "--stages", len(_LOST_AT) + 1, "--slots", 8, "--max-length", 256)
    with serving(*words, "--most-waiting", 200, deadline_s=7200.0) as server:
        return asyncio.run(_storm(server, number))


async def _storm(server: Server, number: int) -> dict[str, Any]:
    choose = random.Random(0)
    kinds = [_body(choose) for _ in range(_KINDS)]
    limits = httpx.Limits(max_connections=_CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=3600.0, limits=limits) as client:
        alone = [(await ask(client, body))["text"] for body in kinds]
        main = psutil.Process(server.running.pid)
        before = _held(main)
        found: dict[str, Any] = {
            "requests": number,
            "answered": 0,
            "aborted": 0,
            "refused": 0,
            "errors": 0,
            "different": 0,
        }
        gaps: list[float] = []
        left = iter(range(number))
        kills = [int(part * number) for part in _LOST_AT]

        async def one() -> None:
            for index in left:
                if index in kills:
                    os.kill(server.workers()[-1].pid, signal.SIGKILL)
                kind = choose.random()
                if kind < 0.05:
                    refused = await _malformed(client, choose)  # not within +=, which reads before it waits
                    found["refused"] += refused
                elif kind < 0.2:
                    await _abort(client, choose, kinds)
                    found["aborted"] += 1
                else:
                    which = choose.randrange(_KINDS)
                    answer = await ask(client, kinds[which])
                    if answer["status"] != 200:
                        found["errors"] += 1
                        continue
                    found["answered"] += 1
                    found["different"] += answer["text"] != alone[which]
                    came = answer["came_s"]
                    gaps.extend(b - a for a, b in pairwise(came))

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(_CLIENTS)))
        found["storm_s"] = round(time.perf_counter() - begun, 1)
        for _ in range(100):
            state = (await client.get("/v1/pipeline")).json()
            if not state["running"]:
                break
            await asyncio.sleep(0.1)
        found["slots_left"] = state["running"] + state["waiting"]
        found["losses"] = len(state["changes"])
    await asyncio.sleep(_KEPT_S)
    after = _held(main)
    found["longest_gap_s"] = round(max(gaps), 2)
    for name in before:
        found[f"{name}_before"], found[f"{name}_after"] = before[name], after[name]
    return found


def _body(choose: random.Random) -> dict[str, Any]:
    words = ["A", "pipe", "that", "carries", "water", "to", "a", "turbine", "is", "a", "penstock"]
    body: dict[str, Any] = {
        "prompt": " ".join(choose.choices(words, k=choose.randrange(1, 12))), "max_tokens": choose.randrange(1, 40),
        "temperature": choose.choice([0, 0, 0.8, 1.3]), "seed": choose.randrange(1000),
    }  # fmt: skip
    if choose.random() < 0.2:
        body["stop"] = [choose.choice(["water", "e", "\n"])]
    if choose.random() < 0.2:
        body |= {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    return body


async def _malformed(client: httpx.AsyncClient, choose: random.Random) -> bool:
    data = choose.choice([b"{", b'{"prompt": 5}', b'{"prompt": "a", "top_p": 7}', b"\xff", b'{"prompt": "a", "x": 1}'])
    answer = await client.post("/v1/completions", content=data)
    return answer.status_code == 400


async def _abort(client: httpx.AsyncClient, choose: random.Random, kinds: list[dict[str, Any]]) -> None:
    many = choose.randrange(4)
    async with client.stream("POST", "/v1/completions", json=choose.choice(kinds) | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if many == 0 or (line.startswith("data: ") and json.loads(line[6:].replace("[DONE]", "0")) == 0):
                break
            many -= 1


def _held(process: psutil.Process) -> dict[str, float]:
    memory = process.memory_info().rss / 2**20
    return {"memory_mib": round(memory, 1), "threads": process.num_threads(), "files": process.num_fds()}
