"""Device-to-device transport over NCCL, if every process with stages has a separate GPU.

    stage 0 ──header──▶ host ────────────────▶ host ──header──▶ stage 1
    stage 0 on a GPU ──copy──▶ buffer ──NCCL──▶ buffer on the GPU of stage 1

NCCL ignores tags: messages on one communicator arrive in order, and a send that waits for its receive blocks all later
ones. So each line between two ranks has a communicator for each direction. Unverified: no machine with two GPUs was
available.
"""

import contextlib
import datetime
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken
from penstock.tensors import synchronize
from penstock.text import first_line
from penstock.transport.base import Pending, Transport

SENDER, RECEIVER = 0, 1  # the ranks of a communicator
_NO_DEADLINE = datetime.timedelta(days=365)  # `health` watches instead
_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENVIRONMENT = threading.Lock()  # guards changes of the process's environment


class Communicator(Protocol):
    """The part of a process group that is used here; the group has two ranks: the sender, then the receiver."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Any:
        """Start a send; returns torch's `Work`."""

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Any:
        """Start a receive; returns torch's `Work`."""

    def abort(self) -> None:
        """Abort operations in flight."""


# creates a communicator from a separate store and the rank in it, SENDER or RECEIVER
Connect = Callable[[Store, int], Communicator]


def connect_nccl(store: Store, place: int) -> Communicator:
    """Create one end of an NCCL communicator of two."""
    from torch.distributed import ProcessGroupNCCL  # missing if torch was built without NCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _NO_DEADLINE
    with _errors_left_to_us():
        made: Any = ProcessGroupNCCL(store, place, 2, options)
    communicator: Communicator = made
    return communicator


def describe_gpu(device: torch.device) -> dict[str, str]:
    """Describe the physical GPU of this process and its NCCL; empty strings if missing."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return {"gpu": gpu, "nccl": "yes" if torch.distributed.is_nccl_available() else ""}


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Keep a group created in the block from ending the process if a peer is lost: the verdict reports that."""
    with _ENVIRONMENT:
        before = os.environ.get(_ERRORS)
        os.environ[_ERRORS] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERRORS]
            else:
                os.environ[_ERRORS] = before


class NcclTransport:
    """A transport that sends tags below 0 from device to device, and all others through `host`.

    A tag's communicator is created with its first message, for which both ends wait; there is no deadlock if all
    processes create communicators in the same order. A receive is started when its message is in flight. `abort` does
    not wait for a communicator that is being created: waits for it fail immediately, and the thread that creates it
    aborts it.

    Example:
        transport = NcclTransport(world.transport, world.store, name="7f3a", connect=connect_nccl)
        transport.send(buffer_on_gpu, to=1, tag=device_tag(7))
    """

    def __init__(self, host: Transport, store: Store, name: str, connect: Connect) -> None:
        self.rank, self.size, self.name = host.rank, host.size, name
        self._host = host
        self._store = PrefixStore(f"penstock/{name}", store)
        self._connect = connect
        self._made: dict[tuple[int, int, int], Future[Communicator]] = {}
        self._lock = threading.Lock()  # never held during a wait
        self._aborted = False

    def send(self, buffer: Tensor, to: int, tag: int) -> Pending:
        """Send a buffer without waiting."""
        if tag >= 0:
            return self._host.send(buffer, to, tag)
        communicator = self._communicator(self.rank, to, tag)
        return self._begin(lambda: communicator.send([buffer], RECEIVER, 0), buffer, to)

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Start a receive; for a buffer on a device the length must be that of the send."""
        if tag >= 0:
            return self._host.receive(buffer, source, tag)
        communicator = self._communicator(source, self.rank, tag)
        return self._begin(lambda: communicator.recv([buffer], SENDER, 0), buffer, source)

    def abort(self) -> None:
        """End all waits of this process, including waits for a device."""
        self._host.abort()
        self._abort_all()

    def close(self) -> None:
        """Close all connections; nothing may be in flight."""
        self._abort_all()
        self._host.close()

    def check(self, peer: int) -> None:
        """Raise `ConnectionBroken` after an abort."""
        if self._aborted:
            raise _given_up(peer)

    def _abort_all(self) -> None:
        with self._lock:
            self._aborted = True
            lines, self._made = self._made, {}
            for (source, to, _), made in lines.items():
                if not made.done():
                    made.set_exception(_given_up(to if source == self.rank else source))
        for made in lines.values():
            if made.exception() is None:
                made.result().abort()

    def _communicator(self, source: int, to: int, tag: int) -> Communicator:
        peer, line = to if source == self.rank else source, (source, to, tag)
        with self._lock:
            self.check(peer)
            found = self._made.get(line)
            made = found if found is not None else self._made.setdefault(line, Future())
        return self._make(line, peer, made) if found is None else made.result()

    def _make(self, line: tuple[int, int, int], peer: int, made: "Future[Communicator]") -> Communicator:
        """Connect a line, which also waits for the other end, and notify the threads that wait for the line."""
        source, to, tag = line
        try:
            store = PrefixStore(f"{source}/{to}/{tag}", self._store)
            communicator = self._connect(store, SENDER if source == self.rank else RECEIVER)
        except BaseException as error:
            with self._lock:
                if not made.done():
                    del self._made[line]  # the next caller may try again
                    made.set_exception(error)
            raise
        with self._lock:
            given_up = made.done()
            if not given_up:
                made.set_result(communicator)
        if given_up:
            communicator.abort()
            raise _given_up(peer)
        return communicator

    def _begin(self, begin: Callable[[], Any], buffer: Tensor, peer: int) -> Pending:
        try:
            return _DevicePending(self, begin(), buffer.device, peer)
        except RuntimeError as error:
            raise ConnectionBroken(f"the connection of devices to rank {peer} broke: {first_line(error)}") from error


def _given_up(peer: int) -> ConnectionBroken:
    return ConnectionBroken(f"the connection of devices to rank {peer} was aborted")


class _DevicePending:
    def __init__(self, transport: NcclTransport, work: Any, device: torch.device, peer: int) -> None:
        self._transport, self._work, self._device, self._peer = transport, work, device, peer

    def wait(self) -> None:
        try:
            self._work.wait()  # with NCCL this blocks the stream, not this thread
            synchronize(self._device)
        except RuntimeError as error:
            raise ConnectionBroken(
                f"the connection of devices to rank {self._peer} broke: {first_line(error)}"
            ) from error
        self._transport.check(self._peer)  # an aborted transfer ends like a completed one

    def is_done(self) -> bool:
        return bool(self._work.is_completed())
