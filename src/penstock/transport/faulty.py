"""Fault injection: a transport that fails on purpose, with its faults declared as data.

    FaultyTransport(transport, [Fault(kind="drop", rank=1, message=3)])

loses the fourth message that rank 1 sends. If PENSTOCK_FAULTS is set to the result of `write_faults`, worker processes
wrap their transports, so that real processes can fail on purpose too:

    start_local(2, {FAULTS_VARIABLE: write_faults([Fault(kind="corrupt", rank=2, message=0)])})
"""

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from torch import Tensor

from penstock.errors import ConnectionBroken, UsageError
from penstock.transport.base import CONTROL, Pending, Together, Transport

FAULTS_VARIABLE = "PENSTOCK_FAULTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one message that a rank sends.

    drop: the message is never sent; delay: this and later messages are sent `delay_s` later; duplicate: it is sent
    twice; corrupt: one byte, chosen by `seed`, is changed; close: the rank loses all connections. Messages are counted
    from 0, on one tag, or by default on all tags except the control tag.
    """

    kind: Literal["drop", "delay", "duplicate", "corrupt", "close"]
    rank: int
    message: int
    tag: int | None = None
    delay_s: float = 0.1
    seed: int = 0


def write_faults(faults: Sequence[Fault]) -> str:
    """Encode faults as JSON, for the environment of a worker."""
    return msgspec.json.encode(list(faults)).decode()


def read_faults(text: str) -> list[Fault]:
    """Decode the result of `write_faults`; raises `UsageError` for anything else."""
    try:
        return msgspec.json.decode(text, type=list[Fault])
    except msgspec.MsgspecError as error:
        raise UsageError(f"{FAULTS_VARIABLE} must be a list of faults: {error}; unset it") from None


def wrap_if_faulty(transport: Transport) -> Transport:
    """Return a transport with the faults set in the environment; without faults, the same transport."""
    text = os.environ.get(FAULTS_VARIABLE)
    return FaultyTransport(transport, read_faults(text)) if text else transport


class FaultyTransport:
    """A transport that forwards all messages to another transport, except for the faults of its rank."""

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._lock = threading.Lock()
        self._waiting = {fault: fault.message for fault in faults if fault.rank == inner.rank}

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer, unless a fault is due."""
        fault = self._due(tag)
        if fault is None:
            return self._inner.send(buffer, to, tag)
        if fault.kind == "drop":
            return Together()
        if fault.kind == "duplicate":
            return Together([self._inner.send(buffer, to, tag) for _ in range(2)])
        if fault.kind == "corrupt":
            return self._inner.send(_corrupted(buffer, fault.seed), to, tag)
        if fault.kind == "close":
            self._inner.abort()
            raise ConnectionBroken(f"rank {self.rank} lost its connections")
        time.sleep(fault.delay_s)
        return self._inner.send(buffer, to, tag)

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a buffer for the next message on a tag."""
        return self._inner.receive(buffer, source, tag)

    def abort(self) -> None:
        """End every wait of this process."""
        self._inner.abort()

    def close(self) -> None:
        """Close all connections."""
        self._inner.close()

    def _due(self, tag: int) -> Fault | None:
        """Count a message; return the fault that applies to it, if any."""
        due = None
        with self._lock:
            for fault, left in list(self._waiting.items()):
                if tag != fault.tag and (fault.tag is not None or tag == CONTROL):
                    continue
                if left:
                    self._waiting[fault] = left - 1
                elif due is None:
                    due = fault
                    del self._waiting[fault]
        return due


def _corrupted(buffer: Tensor, seed: int) -> Tensor:
    chosen = random.Random(seed)  # noqa: S311 -- repeatable, not secret
    damaged = buffer.clone()
    if damaged.numel():
        damaged[chosen.randrange(damaged.numel())] ^= chosen.randint(1, 255)
    return damaged
