"""Channels of stages that several devices share: microbatches are sent round-robin, the end of a stream to all.

                    ┌─ 0, 2, 4 ─▶ stage 1 on b ─ 0, 2, 4 ─┐
stage 0 on a ─ all ─┤                                     ├─ all ─▶ stage 2 on d
                    └─ 1, 3, 5 ─▶ stage 1 on c ─ 1, 3, 5 ─┘
"""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from penstock.engine.channels import Receiver, Sender
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.tracing.record import Track
from penstock.transport.messages import DATA, END, Message


class RoundRobinReceiver:
    """A receiver that takes messages from devices round-robin, and merges their END messages into one.

    `sources` has the index in `receivers` for each microbatch received here, in order, and repeats; see `sources_of`.
    """

    def __init__(self, receivers: Sequence[Receiver], sources: Sequence[int]) -> None:
        self._receivers = tuple(receivers)
        self._sources = tuple(sources)
        self._turn = cycle(self._sources)
        self._taken: deque[tuple[Receiver, ...]] = deque()

    @property
    def width(self) -> int:
        """Number of END messages that close one stream, one per rank at the other end."""
        return len(self._receivers)

    def take(self) -> Message:
        """Wait for the next message."""
        source = self._receivers[next(self._turn)]
        message = source.take()
        if message.kind == DATA:
            self._taken.append((source,))
            return message
        # all earlier microbatches have arrived, so the next message of every other receiver is the end too
        ends = [message if receiver is source else receiver.take() for receiver in self._receivers]
        self._taken.append(self._receivers)
        self._turn = cycle(self._sources)
        return replace(message, body=_joined(ends) if message.kind == END else b"")

    def release(self) -> None:
        """Release the buffer of the oldest message taken."""
        for receiver in self._taken.popleft():
            receiver.release()

    def trace_taking(self, track: Track | None) -> None:
        """Record received messages on a track; None stops recording."""
        for receiver in self._receivers:
            receiver.trace_taking(track)


class RoundRobinSender:
    """A sender that sends messages to devices round-robin, and the end of a stream to all of them."""

    def __init__(self, senders: RoundRobin[Sender]) -> None:
        self._senders = senders

    @property
    def width(self) -> int:
        """Number of END messages that close one stream, one per rank at the other end."""
        return len(self._senders.items)

    def put(self, message: Message) -> int:
        """Send a message and return the bytes sent over a link; the tensors are copied before this returns."""
        if message.kind == DATA:
            return self._senders[message.index].put(message)
        # the reports collected by the end are sent along one path only
        return sum(
            sender.put(message if not place else replace(message, body=b""))
            for place, sender in enumerate(self._senders.items)
        )

    def trace_sending(self, track: Track | None) -> None:
        """Record sent messages on a track; None stops recording."""
        for sender in self._senders.items:
            sender.trace_sending(track)


def sources_of(before: RoundRobin[int], here: RoundRobin[int], rank: int) -> list[int]:
    """Return for each microbatch of a rank the index of its source in `before`, for one round of both orders.

    >>> sources_of(RoundRobin([5, 6], (0, 1)), RoundRobin([7, 8], (0, 0, 1)), rank=7)
    [0, 1, 1, 0]
    """
    period = math.lcm(len(before.order), len(here.order))
    return [before.order[m % len(before.order)] for m in range(period) if here[m] == rank]


def _joined(ends: Sequence[Message]) -> bytes:
    reports = [report for end in ends for report in json.loads(end.body or b"[]")]
    return json.dumps(reports).encode()
