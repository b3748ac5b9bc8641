"""Turns and room in the queue."""

import asyncio
import random

import pytest

from penstock.serve.admission import Admission, Ticket
from penstock.serve.protocol import ApiError


def granted(tickets: list[Ticket]) -> list[bool]:
    return [ticket.granted.done() and not ticket.granted.cancelled() for ticket in tickets]


def test_clients_take_turns() -> None:
    async def run() -> None:
        queue = Admission(slots=1, most_waiting=10)
        many, few = queue.enter("many", 4), queue.enter("few", 1)
        assert granted([*many, *few]) == [True, False, False, False, False]
        many[0].leave()
        many[1].leave()
        # it does not wait for all that asked before it
        assert granted([*many[2:], *few]) == [False, False, True]
        few[0].leave()
        assert granted(many[2:]) == [True, False]
        for ticket in (*many, *few):
            ticket.leave()
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


def test_admission_queue_is_bounded() -> None:
    async def run() -> None:
        queue = Admission(slots=2, most_waiting=3)
        tickets = queue.enter("a", 5)
        with pytest.raises(ApiError) as caught:
            queue.enter("b", 1, retry_s=7.2)
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "7")
        tickets[4].leave()
        assert queue.num_waiting == 2
        assert granted(queue.enter("b", 1)) == [False]
        with pytest.raises(ApiError):
            queue.enter("b", 1)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_slot_is_returned_however_a_request_ends(seed: int) -> None:
    async def run() -> None:
        choose = random.Random(seed)
        queue = Admission(slots=3, most_waiting=1000)
        running, most = 0, 0

        async def ask(client: str) -> None:
            nonlocal running, most
            (ticket,) = queue.enter(client, 1)
            try:
                async with asyncio.timeout(choose.choice([0.001, 0.01, 1.0])), ticket:
                    running += 1
                    most = max(most, running)
                    try:
                        await asyncio.sleep(choose.choice([0.0, 0.002, 0.01]))
                        if choose.random() < 0.2:
                            raise ValueError
                    finally:
                        running -= 1
            except (TimeoutError, ValueError):
                pass
            finally:
                ticket.leave()

        tasks = [asyncio.create_task(ask(choose.choice("abc"))) for _ in range(200)]
        await asyncio.sleep(0.005)
        for task in choose.sample(tasks, 50):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 3
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())
