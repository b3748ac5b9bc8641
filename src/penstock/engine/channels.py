"""Both ends of a link: a receiver with receives posted ahead, a sender with sends in flight.

Both have a fixed number of buffers, the depth, so a stage that is too fast waits for a free send buffer: a buffer is
free once the next stage has posted a receive for it. Buffers are on the host; with a GPU they are pinned, for copies at
full speed.

On a link between two devices tensors have device buffers and a separate tag. They are received after their header, so a
device never waits for a message that is not in flight; so the sender has as many buffers as both sides together.
"""

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import ConnectionBroken, TransportError
from penstock.tensors import HOST, copy_exactly, mark
from penstock.tracing.record import Track
from penstock.transport.base import Pending, Transport, device_tag
from penstock.transport.messages import CLOSE, Format, Laid, Message, apart_of, program_of, size_of

_POLL_S = 0.1
_Buffers = tuple[Tensor, Tensor | None]  # of a message, and of its tensors if they are apart


class Receiver(Protocol):
    """An ordered source of messages; `direct` if their tensors come from a device to this one."""

    direct: bool

    def take(self) -> Message:
        """Wait for the next message; its tensors are valid until `release`."""

    def has_arrived(self) -> bool:
        """Return whether `take` would return at once."""

    def release(self, copied: Any = None) -> None:
        """Release the buffer of the oldest message taken, or let it be released at the event `copied` of a device."""

    def trace_taking(self, track: Track | None) -> None:
        """Record received messages on a track; None stops recording."""


class Sender(Protocol):
    """An ordered sink of messages; `direct` if their tensors go to another device."""

    direct: bool

    def put(self, message: Message) -> int:
        """Send a message and return the bytes sent over a link; the tensors are copied before this returns."""

    def trace_sending(self, track: Track | None) -> None:
        """Record sent messages on a track; None stops recording."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The device and size of the tensor buffers of a link between two devices."""

    device: torch.device
    num_bytes: int

    def make(self) -> Tensor:
        """Allocate a buffer, at least the one byte that is sent to connect."""
        return torch.zeros(max(self.num_bytes, 1), dtype=torch.uint8, device=self.device)


class RemoteReceiver:
    """A receiver from another rank, with `depth` receives posted ahead.

    `formats` has the format of the messages of each program. For a GPU, the `device`, there are as many buffers again,
    which are posted while it copies from the others:

        posted ──take──▶ taken ──release──▶ copied ──event──▶ spare
           ▲                                                    │
           └────────────────────────────────────────────────────┘
    """

    def __init__(
        self,
        transport: Transport,
        source: int,
        tag: int,
        formats: Sequence[Format],
        num_bytes: int,
        depth: int,
        *,
        device: torch.device = HOST,
        apart: Apart | None = None,
    ) -> None:
        self._fetch: Callable[[int], Tensor] | None = None
        self.direct = apart is not None
        if apart is not None:
            there = apart.make()
            transport.receive(there[:1], source, device_tag(tag)).wait()  # the first byte connects
            self._fetch = partial(self._receive_apart, there)
        self._transport = transport
        self._source = source
        self._tag = tag
        self._formats = formats
        self._posted: deque[tuple[Pending, Tensor]] = deque()
        self._taken: deque[Tensor] = deque()
        self._copied: deque[tuple[Any, Tensor]] = deque()  # events, and the buffers that a device reads until then
        self._track: Track | None = None
        self._spare = [_make_buffer(num_bytes, device) for _ in range(depth if device == HOST else 2 * depth)]
        for _ in range(depth):
            self._post(self._spare.pop())

    def take(self) -> Message:
        """Wait for the next message."""
        pending, buffer = self._posted.popleft()
        track = self._track
        begin_s = track.now() if track else 0.0
        pending.wait()
        arrived_s = track.now() if track else 0.0
        message = self._read(buffer)
        self._taken.append(buffer)
        if track:
            track.took(message.index, begin_s, arrived_s, size_of(buffer))
        if message.kind == CLOSE:
            self._drain()
        return message

    def has_arrived(self) -> bool:
        """Return whether the next message is here."""
        return bool(self._posted) and self._posted[0][0].is_done()

    def release(self, copied: Any = None) -> None:
        """Post the oldest message's buffer again, or a spare one if a device may read it until the event `copied`."""
        buffer = self._taken.popleft()
        if copied is None:
            self._post(buffer)
            return
        self._copied.append((copied, buffer))
        while self._copied and (not self._spare or self._copied[0][0].query()):
            event, read = self._copied.popleft()
            event.synchronize()
            self._spare.append(read)
        self._post(self._spare.pop(0))

    def _read(self, buffer: Tensor) -> Message:
        program = program_of(buffer)
        if program >= len(self._formats):
            raise TransportError(
                f"a message names program {program}, but this link has {len(self._formats)}, numbered from 0; check "
                "the network and try again"
            )
        return self._formats[program].read(buffer, self._fetch)

    def _receive_apart(self, there: Tensor, num_bytes: int) -> Tensor:
        """Receive the tensors of a message after its header; the previous message's tensors have been released."""
        tensors = there[:num_bytes]
        self._transport.receive(tensors, self._source, device_tag(self._tag)).wait()
        return tensors

    def _post(self, buffer: Tensor) -> None:
        self._posted.append((self._transport.receive(buffer, self._source, self._tag), buffer))

    def trace_taking(self, track: Track | None) -> None:
        """Record received messages on a track; None stops recording."""
        self._track = track

    def _drain(self) -> None:
        """Wait for all posted receives, since none may stay posted on a closed tag: each buffer receives one CLOSE."""
        while self._posted:
            self._posted.popleft()[0].wait()


class RemoteSender:
    """A sender to another rank, with up to `depth` sends in flight.

    `put` waits until a device has copied the tensors to the host; between `begin` and `send` its caller can go on.
    """

    def __init__(
        self,
        transport: Transport,
        to: int,
        tag: int,
        formats: Sequence[Format],
        num_bytes: int,
        depth: int,
        *,
        device: torch.device = HOST,
        apart: Apart | None = None,
    ) -> None:
        self.direct = apart is not None
        self._transport = transport
        self._to = to
        self._tag = tag
        self._formats = formats
        # a receiver between devices posts nothing ahead, so the sender has as many buffers as both ends together
        self._free = deque(
            (_make_buffer(num_bytes, device), apart.make() if apart is not None else None)
            for _ in range(depth if apart is None else 2 * depth)
        )
        if apart is not None:
            transport.send(apart.make()[:1], to, device_tag(tag)).wait()
        self._sending: deque[tuple[list[Pending], _Buffers]] = deque()
        self._depth = depth
        self._track: Track | None = None
        # the message that is being written, and the begin of its sending if no device copies it first
        self._begun: tuple[Message, Laid, _Buffers, float | None] | None = None

    def put(self, message: Message) -> int:
        """Wait for a free buffer, write the message to it and send it; returns its bytes."""
        num_bytes = 0
        for _ in range(self._depth if message.kind == CLOSE else 1):
            if (copied := self.begin(message)) is not None:
                copied.synchronize()
            num_bytes += self.send()
        if message.kind == CLOSE:
            while self._sending:
                self._wait_for_room()
        return num_bytes

    def trace_sending(self, track: Track | None) -> None:
        """Record sent messages on a track; None stops recording."""
        self._track = track

    def begin(self, message: Message) -> Any:
        """Wait for a free buffer and begin to copy the message to it; `send` ends this, before another message begins.

        Returns the event at which a device has copied the tensors to this host; None if nothing has to be waited for.
        """
        track = self._track
        begin_s = track.now() if track else 0.0
        buffer, apart = self._free.popleft() if self._free else self._wait_for_room()
        room_s = track.now() if track else 0.0
        if track:
            track.awaited(message.index, begin_s, room_s)
        laid = self._formats[message.program].lay(message, buffer, apart)
        device = next((tensor.device for tensor in message.tensors if tensor.device != HOST), HOST)
        copied = mark(device) if apart is None else None  # tensors apart stay on their device
        self._begun = message, laid, (buffer, apart), None if copied is not None else room_s
        return copied

    def send(self) -> int:
        """Send the message that was begun, after its event; returns its bytes."""
        if self._begun is None:
            return 0
        (message, laid, (buffer, apart), since_s), self._begun = self._begun, None
        track = self._track
        begin_s = track.now() if track and since_s is None else since_s or 0.0
        num_bytes = self._formats[message.program].seal(message, laid)
        sends = [self._transport.send(buffer[:num_bytes], self._to, self._tag)]
        num_apart = apart_of(buffer) if apart is not None else 0
        if apart is not None and num_apart:
            sends.append(self._transport.send(apart[:num_apart], self._to, device_tag(self._tag)))
        self._sending.append((sends, (buffer, apart)))
        if track:
            track.gave(message.index, begin_s, size_of(buffer))
        return num_bytes + num_apart

    def _wait_for_room(self) -> _Buffers:
        """Wait until the oldest message in flight is sent; returns its buffers."""
        sends, buffers = self._sending.popleft()
        for pending in sends:
            pending.wait()
        return buffers


def _make_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate a buffer on the host, pinned for a GPU."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class LocalChannel:
    """Both ends of a link within one process; copies like a remote sender. Without a depth, sends never block."""

    direct = False

    def __init__(self, depth: int | None) -> None:
        # SimpleQueue runs no Python code while waiting or passing items; free places are counted by tokens
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bounded = depth is not None
        for _ in range(depth or 0):
            self._places.put(None)
        self._aborted = False
        self._taking: Track | None = None
        self._sending_track: Track | None = None

    def trace_taking(self, track: Track | None) -> None:
        """Record received messages on a track; None stops recording."""
        self._taking = track

    def trace_sending(self, track: Track | None) -> None:
        """Record sent messages on a track; None stops recording."""
        self._sending_track = track

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

    def has_arrived(self) -> bool:
        """Return whether a message is queued."""
        return not self._messages.empty()

    def release(self, copied: Any = None) -> None:
        """Do nothing: no buffer is held."""

    def put(self, message: Message) -> int:
        """Queue a copy, waiting for room; returns 0, as no link is used."""
        while not self.offer(message, _POLL_S):
            self._check()
        return 0

    def offer(self, message: Message, timeout_s: float) -> bool:
        """Queue a copy if room is available within the timeout; returns whether it was."""
        begin_s = self._sending_track.now() if self._sending_track else 0.0
        try:
            if self._bounded:
                self._places.get(timeout=timeout_s)
        except queue.Empty:
            return False
        room_s = self._sending_track.now() if self._sending_track else 0.0
        # the caller may change the tensors as soon as this returns
        copies = [copy_exactly(tensor.detach()) for tensor in message.tensors]
        self._messages.put(replace(message, tensors=copies))
        if self._sending_track:
            self._sending_track.awaited(message.index, begin_s, room_s)
            self._sending_track.gave(message.index, room_s, 0)
        return True

    def abort(self) -> None:
        """End every wait with `ConnectionBroken`."""
        self._aborted = True

    def _check(self) -> None:
        if self._aborted:
            raise ConnectionBroken("the stream was aborted")
