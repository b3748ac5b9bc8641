"""Thousands of requests, some aborted, some malformed, while processes are killed, stopped and come back."""

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
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
_STAGES = 3
_STOPPED_S = 6.0  # longer than the silence after which a process is lost
_WATCHED_S = 10.0  # after a fault, for its gap


def storm(folder: Path, number: int, faults: int) -> dict[str, Any]:
    """Ask every kind of request alone, then so many at random, and at least until so many faults are over.

    Returns what was lost or different.
    """
    words = (f"hf:{folder}", "--open", "--stages", _STAGES, "--set", "slots=8", "--max-length", 256)
    with serving(*words, "--set", "most_waiting=200", deadline_s=7200.0) as server:
        found, joined = asyncio.run(_storm(server, number, faults))
        ended = server.end()
        found["ended"] = [ended.status, *(each.wait(60) for each in joined)]
        return found


class _Faults:
    """Ends or stops processes that hold stages, one at a time, each after the one before has been replaced or is back.

    Killed ones are replaced by `penstock worker --join`.
    """

    def __init__(self, server: Server, client: httpx.AsyncClient, number: int) -> None:
        self.moments_s: list[float] = []
        self.kinds = {"killed": 0, "stopped": 0}
        self.done = not number
        self._server, self._client, self._number = server, client, number
        self.joined: list[subprocess.Popen[bytes]] = []

    async def run(self) -> None:
        """Cause them all."""
        choose = random.Random(1)
        while len(self.moments_s) < self._number:
            state = await self._all_there()
            await asyncio.sleep(choose.uniform(0.5, 3.0))
            alive = [each.pid for each in self.joined if each.poll() is None]
            victim = choose.choice([*(each.pid for each in self._server.workers()), *alive])
            self.moments_s.append(time.perf_counter())
            if choose.random() < 0.5:
                self.kinds["killed"] += 1
                os.kill(victim, signal.SIGKILL)
                command = [sys.executable, "-m", "penstock", "worker", "--join", state["joins_at"]]
                self.joined.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            else:
                self.kinds["stopped"] += 1
                os.kill(victim, signal.SIGSTOP)
                await asyncio.sleep(_STOPPED_S)
                os.kill(victim, signal.SIGCONT)
            await asyncio.sleep(_WATCHED_S)
        await self._all_there()
        self.done = True

    async def _all_there(self) -> dict[str, Any]:
        while True:
            state: dict[str, Any] = (await self._client.get("/v1/pipeline")).json()
            if len(state["stages"]) == _STAGES:  # each on a device of its own
                return state
            await asyncio.sleep(0.2)


def _gap_s(begin_s: float, tokens_s: list[float]) -> float:
    """Return the longest time without a token of any request after a fault."""
    near = [begin_s, *(moment for moment in tokens_s if begin_s < moment < begin_s + _WATCHED_S)]
    return max((b - a for a, b in pairwise(near)), default=_WATCHED_S)


async def _storm(server: Server, number: int, num_faults: int) -> tuple[dict[str, Any], list[Any]]:
    choose = random.Random(0)
    kinds = [_body(choose) for _ in range(_KINDS)]
    limits = httpx.Limits(max_connections=_CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=3600.0, limits=limits) as client:
        alone = [(await ask(client, body))["text"] for body in kinds]
        main = psutil.Process(server.running.pid)
        before = _held(main)
        found: dict[str, Any] = {"requests": 0, "answered": 0, "aborted": 0, "refused": 0, "errors": 0, "different": 0}
        gaps: list[float] = []
        tokens_s: list[float] = []
        faults = _Faults(server, client, num_faults)

        async def one() -> None:
            while found["requests"] < number or not faults.done:
                found["requests"] += 1
                kind = choose.random()
                if kind < 0.05:
                    refused = await _malformed(client, choose)  # not within +=, which reads before it waits
                    found["refused"] += refused
                elif kind < 0.2:
                    await _abort(client, choose, kinds)
                    found["aborted"] += 1
                else:
                    which = choose.randrange(_KINDS)
                    asked_s = time.perf_counter()
                    answer = await ask(client, kinds[which])
                    if answer["status"] != 200:
                        found["errors"] += 1
                        continue
                    found["answered"] += 1
                    found["different"] += answer["text"] != alone[which]
                    came = answer["came_s"]
                    tokens_s.extend(asked_s + moment for moment in came)
                    gaps.extend(b - a for a, b in pairwise(came))

        begun = time.perf_counter()
        await asyncio.gather(faults.run(), *(one() for _ in range(_CLIENTS)))
        found["storm_s"] = round(time.perf_counter() - begun, 1)
        for _ in range(100):
            state = (await client.get("/v1/pipeline")).json()
            if not state["running"]:
                break
            await asyncio.sleep(0.1)
        found["slots_left"] = state["running"] + state["waiting"]
        found["changes"] = len(state["changes"])
        tokens_s.sort()
        lost = sorted(_gap_s(moment, tokens_s) for moment in faults.moments_s)
        found |= {"faults": len(lost), **faults.kinds}
        if lost:
            found |= {"fault_gap_median_s": round(statistics.median(lost), 2), "fault_gap_worst_s": round(lost[-1], 2)}
    await asyncio.sleep(_KEPT_S)
    after = _held(main)
    found["longest_gap_s"] = round(max(gaps), 2)
    for name in before:
        found[f"{name}_before"], found[f"{name}_after"] = before[name], after[name]
    return found, faults.joined


def _body(choose: random.Random) -> dict[str, Any]:
    words = ["A", "pipe", "that", "carries", "water", "to", "a", "turbine", "is", "a", "penstock"]
    body: dict[str, Any] = {
        "prompt": " ".join(choose.choices(words, k=choose.randrange(1, 12))),
        "max_tokens": choose.randrange(1, 40),
        "temperature": choose.choice([0, 0, 0.8, 1.3]),
        "seed": choose.randrange(1000),
    }
    if choose.random() < 0.2:
        body["stop"] = [choose.choice(["water", "e", "\n"])]
    if choose.random() < 0.2:
        body |= {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    return body


async def _malformed(client: httpx.AsyncClient, choose: random.Random) -> bool:
    data = choose.choice([b"{", b'{"prompt": 5}', b'{"prompt": "a", "top_p": 7}', b"\xff", b'{"prompt": "a", "x": 1}'])
    answer = await client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
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
