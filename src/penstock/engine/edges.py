"""The two ends of a cut: an inlet with receives posted ahead, an outlet with sends under way.

Both have a fixed number of buffers, the depth, so a stage that is too fast waits: for a free send
buffer, which is free when the next stage has posted a receive for it. Buffers lie on the host; those
beside a GPU are pinned, which is what it copies from and to at full speed.
"""

import queue
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.layout import copy_exactly
from penstock.engine.messages import CLOSE, Formats, Message, size_of
from penstock.engine.transport import Pending, Transport
from penstock.errors import ConnectionBroken
from penstock.tracing.record import Track

_POLL_S = 0.1


class Inlet(Protocol):
    """Where messages come in, in order."""

    @property
    def width(self) -> int:
        """How many messages the end of a stream is."""

    def take(self) -> Message:
        """Wait for the next message; its tensors are good until `release`."""

    def release(self) -> None:
        """Give back the memory of the oldest message taken."""

    def trace_taking(self, track: Track | None) -> None:
        """Record on a track what comes in; on none, nothing."""


class Outlet(Protocol):
    """Where messages go out, in order."""

    @property
    def width(self) -> int:
        """How many messages the end of a stream is."""

    def put(self, message: Message) -> None:
        """Send a message; the tensors are copied before this returns."""

    def trace_giving(self, track: Track | None) -> None:
        """Record on a track what goes out; on none, nothing."""


class RemoteInlet:
    """Receives from another rank, with `depth` receives posted ahead."""

    width = 1

    def __init__(
        self, transport: Transport, source: int, channel: int, layout: Formats, num_bytes: int, depth: int, *,
        pinned: bool = False,
    ) -> None:  # fmt: skip
        self._transport = transport
        self._source = source
        self._channel = channel
        self._format = layout
        self._posted: deque[tuple[Pending, Tensor]] = deque()
        self._taken: deque[Tensor] = deque()
        self._track: Track | None = None
        for _ in range(depth):
            self._post(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned))

    def take(self) -> Message:
        """Wait for the next message."""
        pending, buffer = self._posted.popleft()
        track = self._track
        begin_s = track.now() if track else 0.0
        pending.wait()
        arrived_s = track.now() if track else 0.0
        message = self._format.read(buffer)
        self._taken.append(buffer)
        if track:
            track.took(message.index, begin_s, arrived_s, size_of(buffer))
        if message.kind == CLOSE:
            self._drain()
        return message

    def release(self) -> None:
        """Post the oldest message's buffer again."""
        self._post(self._taken.popleft())

    def _post(self, buffer: Tensor) -> None:
        self._posted.append((self._transport.receive(buffer, self._source, self._channel), buffer))

    def trace_taking(self, track: Track | None) -> None:
        """Record on a track what comes in; on none, nothing."""
        self._track = track

    def _drain(self) -> None:
        """Nothing may stay posted on a channel that is done: the sender sends CLOSE once for each buffer."""
        while self._posted:
            self._posted.popleft()[0].wait()


class RemoteOutlet:
    """Sends to another rank, with up to `depth` sends under way."""

    width = 1

    def __init__(
        self, transport: Transport, to: int, channel: int, layout: Formats, num_bytes: int, depth: int, *,
        pinned: bool = False,
    ) -> None:  # fmt: skip
        self._transport = transport
        self._to = to
        self._channel = channel
        self._format = layout
        self._free = deque(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(depth))
        self._sending: deque[tuple[Pending, Tensor]] = deque()
        self._depth = depth
        self._track: Track | None = None

    def put(self, message: Message) -> None:
        """Wait for a free buffer, lay the message out in it and send it."""
        for _ in range(self._depth if message.kind == CLOSE else 1):
            self._send(message)
        if message.kind == CLOSE:
            while self._sending:
                self._sending.popleft()[0].wait()

    def trace_giving(self, track: Track | None) -> None:
        """Record on a track what goes out; on none, nothing."""
        self._track = track

    def _send(self, message: Message) -> None:
        track = self._track
        begin_s = track.now() if track else 0.0
        if self._free:
            buffer = self._free.popleft()
        else:
            pending, buffer = self._sending.popleft()
            pending.wait()
        room_s = track.now() if track else 0.0
        num_bytes = self._format.write(message, buffer)
        self._sending.append((self._transport.send(buffer[:num_bytes], self._to, self._channel), buffer))
        if track:
            track.gave(message.index, begin_s, room_s, num_bytes)


class LocalEdge:
    """Both ends within one process; as an outlet it copies, as a remote one does. Without a depth it never waits."""

    width = 1

    def __init__(self, depth: int | None, *, copies: bool = True) -> None:
        # SimpleQueue needs no Python while it waits or hands over; places are counted by tokens
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bounded = depth is not None
        for _ in range(depth or 0):
            self._places.put(None)
        self._copies = copies
        self._aborted = False
        self._taking: Track | None = None
        self._giving: Track | None = None

    def trace_taking(self, track: Track | None) -> None:
        """Record on a track what comes in; on none, nothing."""
        self._taking = track

    def trace_giving(self, track: Track | None) -> None:
        """Record on a track what goes out; on none, nothing."""
        self._giving = track

    def take(self) -> Message:
        """Wait for the next message."""
        begin_s = self._taking.now() if self._taking else 0.0
        while True:
            try:
                message = self._messages.get(timeout=_POLL_S)
            except queue.Empty:
                self._check()
                continue
            if self._bounded:
                self._places.put(None)
            if self._taking:
                self._taking.took(message.index, begin_s, self._taking.now(), 0)
            return message

    def release(self) -> None:
        """Nothing is kept."""

    def put(self, message: Message) -> None:
        """Hand over a copy, once there is room."""
        while not self.offer(message, _POLL_S):
            self._check()

    def offer(self, message: Message, timeout_s: float) -> bool:
        """Hand over a copy if there is room within some seconds; tells whether there was."""
        begin_s = self._giving.now() if self._giving else 0.0
        try:
            if self._bounded:
                self._places.get(timeout=timeout_s)
        except queue.Empty:
            return False
        room_s = self._giving.now() if self._giving else 0.0
        if self._copies:
            copies = [copy_exactly(tensor) for tensor in message.tensors]
            message = Message(message.kind, message.index, message.sizes, copies, message.body)
        self._messages.put(message)
        if self._giving:
            self._giving.gave(message.index, begin_s, room_s, 0)
        return True

    def abort(self) -> None:
        """End every wait with `ConnectionBroken`."""
        self._aborted = True

    def _check(self) -> None:
        if self._aborted:
            raise ConnectionBroken("the stream was given up")
