"""Lanes of work: a large piece at a time, small ones beside it, and places that are held until a thread ends."""

import asyncio
import contextlib
import threading
from collections import Counter

import pytest

from penstock.serve.admission import SMALL_BYTES, Desk, Lane, lane_of
from penstock.serve.protocol import ApiError


def test_a_lane_has_its_number_of_threads() -> None:
    running: Counter[Lane] = Counter()
    most: Counter[Lane] = Counter()
    lock, both = threading.Lock(), threading.Barrier(5)

    def work(lane: Lane) -> Lane:
        with lock:
            running[lane] += 1
            most[lane] = max(most[lane], running[lane])
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # four small pieces and a large one, at least once
        with lock:
            running[lane] -= 1
        return lane

    async def run() -> None:
        desk = Desk(most_waiting=100)
        lanes = [lane_of(size) for size in (1, SMALL_BYTES, SMALL_BYTES + 1) for _ in range(5)]
        assert await asyncio.gather(*(desk.run("a", lane, work, lane) for lane in lanes)) == lanes

    asyncio.run(run())
    assert most == {"small": 4, "large": 1}


def test_cancelled_work_holds_its_place_until_its_thread_ends() -> None:
    held, begun = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return held.wait(10)

    async def run() -> None:
        desk = Desk(most_waiting=1)
        first = asyncio.create_task(desk.run("a", "large", wait))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(desk.run("b", "large", held.is_set))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError) as caught:
            await desk.run("c", "large", int)
        assert caught.value.status == 429
        held.set()
        assert await second
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(run())
