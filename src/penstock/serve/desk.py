"""Work on requests before their turn (bodies, parsing, tokens, images, grammars), bounded and off the event loop."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from penstock.serve.admission import Admission, Ticket

SMALL_BYTES = 64 << 10  # of a body, or of a text: neither waits nor is noticed
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Desk:
    """Admits a few bodies, a few small pieces of work and one large one at a time, round-robin by client.

    Example:
        image = await desk.run("10.0.0.7", len(data) > SMALL_BYTES, decode, data)

    Raises `ApiError` 429 if too many wait. Use it from one event loop.
    """

    def __init__(self, most_waiting: int) -> None:
        self._bodies = Admission(slots=32, most_waiting=most_waiting)
        self._small = Admission(slots=4, most_waiting=most_waiting)  # fewer than the threads of asyncio.to_thread
        self._large = Admission(slots=1, most_waiting=most_waiting)

    def body(self, client: str) -> Ticket:
        """Return a ticket for a body that is not small."""
        return self._bodies.enter(client, 1)[0]

    async def run(
        self, client: str, large: bool, work: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
    ) -> _Result:
        """Return the result of work in a thread."""
        (ticket,) = (self._large if large else self._small).enter(client, 1)

        async def admitted() -> _Result:
            async with ticket:
                return await asyncio.to_thread(work, *args, **kwargs)

        # a thread cannot be cancelled: its ticket is held until it ends
        return await asyncio.shield(admitted())
