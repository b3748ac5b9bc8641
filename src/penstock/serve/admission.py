"""Bounded admission queue, round-robin between clients."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

from penstock.resources import release_freed
from penstock.serve.protocol import ApiError


class Ticket:
    """A place in the queue, later a slot. Released by leaving the `async with` block, or by `leave()`."""

    def __init__(self, queue: "Admission", client: str) -> None:
        self._queue, self.client = queue, client
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = False

    async def __aenter__(self) -> None:
        await self.granted

    async def __aexit__(self, *_error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Release the slot or the place in the queue."""
        if not self._left:
            self._left = True
            self._queue.left(self)


class Admission:
    """Grants a fixed number of slots; further requests wait in a bounded queue, served round-robin by client.

    Example:
        queue = Admission(slots=8, most_waiting=64)
        tickets = queue.enter("10.0.0.7", 1)
        async with tickets[0]:
            ...

    Not thread-safe: use it from one event loop.
    """

    def __init__(self, *, slots: int, most_waiting: int) -> None:
        self.slots, self.most_waiting = slots, most_waiting
        self._free = slots
        self._waiting: OrderedDict[str, deque[Ticket]] = OrderedDict()  # in round-robin order, the next client first

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Number of requests in slots."""
        return self.slots - self._free

    def enter(self, client: str, number: int, *, retry_s: float = 1.0) -> list[Ticket]:
        """Queue `number` requests of a client; raises `ApiError` 429 unless the queue has room for all of them."""
        self.check_room(number, retry_s=retry_s)
        tickets = [Ticket(self, client) for _ in range(number)]
        self._waiting.setdefault(client, deque()).extend(tickets)
        self._grant()
        return tickets

    def check_room(self, number: int, *, retry_s: float = 1.0) -> None:
        """Raise `ApiError` 429 unless the queue has room for so many requests now."""
        if self.num_waiting + number > self.most_waiting + self._free:
            raise ApiError(
                f"{self.num_waiting} requests are waiting, the limit is {self.most_waiting}; try again later",
                code="queue_full",
                headers={"Retry-After": str(max(1, round(retry_s)))},
                status=429,
            )

    def left(self, ticket: Ticket) -> None:
        """Return a ticket's slot, or remove it from the queue."""
        if ticket.granted.done() and not ticket.granted.cancelled():
            self._free += 1
        else:
            ticket.granted.cancel()
            own = self._waiting.get(ticket.client, deque())
            if ticket in own:
                own.remove(ticket)
            if not own:
                self._waiting.pop(ticket.client, None)
        self._grant()

    def _grant(self) -> None:
        while self._free and self._waiting:
            client, own = next(iter(self._waiting.items()))
            ticket = own.popleft()
            if own:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if ticket.granted.cancelled():  # its task was cancelled
                continue
            self._free -= 1
            ticket.granted.set_result(None)


SMALL_BYTES = 64 << 10  # of a body, or of a text: neither waits nor is noticed
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
Lane = Literal["body", "small", "large", "trial"]


class Desk:
    """Admits a few bodies and small pieces of work, one large one and one trial at a time, round-robin by client.

    Example:
        image = await desk.run("10.0.0.7", lane_of(len(data)), decode, data)

    Raises `ApiError` 429 if too many wait. Use it from one event loop.
    """

    def __init__(self, most_waiting: int) -> None:
        # together at most the threads of asyncio.to_thread on two cores
        slots: dict[Lane, int] = {"body": 32, "small": 4, "large": 1, "trial": 1}
        self._lanes = {lane: Admission(slots=number, most_waiting=most_waiting) for lane, number in slots.items()}

    def body(self, client: str) -> Ticket:
        """Return a ticket for a body that is not small."""
        return self._lanes["body"].enter(client, 1)[0]

    async def run(
        self, client: str, lane: Lane, work: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
    ) -> _Result:
        """Return the result of work in a thread; memory that large work has freed goes back to the system."""
        (ticket,) = self._lanes[lane].enter(client, 1)

        def done() -> _Result:
            try:
                return work(*args, **kwargs)
            finally:
                if lane == "large":
                    release_freed()

        async def admitted() -> _Result:
            async with ticket:
                return await asyncio.to_thread(done)

        # a thread cannot be cancelled: its ticket is held until it ends
        return await asyncio.shield(admitted())


def lane_of(size: int) -> Lane:
    """Return the lane of work on a body or a text of this size."""
    return "large" if size > SMALL_BYTES else "small"
