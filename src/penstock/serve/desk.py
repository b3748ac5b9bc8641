"""Work on requests before their turn (bodies, parsing, tokens, images, grammars), bounded and off the event loop."""

import asyncio
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

from penstock.memory import release_freed
from penstock.serve.admission import Admission, Ticket

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
