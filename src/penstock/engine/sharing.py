"""Edges of stages that several devices share: microbatches take turns, the end of a stream goes through all.

                    ┌─ 0, 2, 4 ─▶ stage 1 on b ─ 0, 2, 4 ─┐
stage 0 on a ─ all ─┤                                     ├─ all ─▶ stage 2 on d
                    └─ 1, 3, 5 ─▶ stage 1 on c ─ 1, 3, 5 ─┘
"""

import json
import math
from collections import deque
from collections.abc import Sequence
from itertools import cycle

from penstock.engine.channels import Inlet, Outlet
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.tracing.record import Track
from penstock.transport.messages import DATA, END, Message


class SharedInlet:
    """Takes each message from the device whose turn it was, and the end of a stream from all of them as one.

    `sources` has the place in `inlets` of every microbatch that comes here, in order and again and again; see
    `sources_of`.
    """

    def __init__(self, inlets: Sequence[Inlet], sources: Sequence[int]) -> None:
        self._inlets = tuple(inlets)
        self._sources = tuple(sources)
        self._turn = cycle(self._sources)
        self._taken: deque[tuple[Inlet, ...]] = deque()

    @property
    def width(self) -> int:
        """How many messages the end of a stream is."""
        return len(self._inlets)

    def take(self) -> Message:
        """Wait for the next message."""
        source = self._inlets[next(self._turn)]
        message = source.take()
        if message.kind == DATA:
            self._taken.append((source,))
            return message
        # whatever was fed before it has gone through: the others' next message is the end as well
        ends = [message if inlet is source else inlet.take() for inlet in self._inlets]
        self._taken.append(self._inlets)
        self._turn = cycle(self._sources)
        return Message(message.kind, message.index, body=_joined(ends) if message.kind == END else b"")

    def release(self) -> None:
        """Give back the memory of the oldest message taken."""
        for inlet in self._taken.popleft():
            inlet.release()

    def trace_taking(self, track: Track | None) -> None:
        """Record on a track what comes in; on none, nothing."""
        for inlet in self._inlets:
            inlet.trace_taking(track)


class SharedOutlet:
    """Sends each message to the device whose turn it is, and the end of a stream to all of them."""

    def __init__(self, outlets: RoundRobin[Outlet]) -> None:
        self._outlets = outlets

    @property
    def width(self) -> int:
        """How many messages the end of a stream is."""
        return len(self._outlets.items)

    def put(self, message: Message) -> None:
        """Send a message; the tensors are copied before this returns."""
        if message.kind == DATA:
            self._outlets[message.index].put(message)
            return
        for place, outlet in enumerate(self._outlets.items):
            # what the end collects on its way goes one way only
            outlet.put(message if not place else Message(message.kind, message.index))

    def trace_giving(self, track: Track | None) -> None:
        """Record on a track what goes out; on none, nothing."""
        for outlet in self._outlets.items:
            outlet.trace_giving(track)


def sources_of(before: RoundRobin[int], here: RoundRobin[int], rank: int) -> list[int]:
    """Say where a rank's microbatches come from: places in `before`, one round of both orders.

    >>> sources_of(RoundRobin([5, 6], (0, 1)), RoundRobin([7, 8], (0, 0, 1)), rank=7)
    [0, 1, 1, 0]
    """
    period = math.lcm(len(before.order), len(here.order))
    return [before.order[m % len(before.order)] for m in range(period) if here[m] == rank]


def _joined(ends: Sequence[Message]) -> bytes:
    reports = [report for end in ends for report in json.loads(end.body or b"[]")]
    return json.dumps(reports).encode()
