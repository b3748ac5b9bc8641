"""Process groups: their ranks, failure handling, dismissal and shutdown."""

import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken, PenstockError, TransportError, UsageError
from penstock.group.addresses import PrivateFolder
from penstock.group.board import Verdict
from penstock.group.launcher import WorkerExit
from penstock.group.links import close_store
from penstock.group.liveness import Health
from penstock.group.roll_call import Membership
from penstock.random_states import RandomStates
from penstock.tracing.record import Clock
from penstock.transport.base import WORD_BYTES, MeteredTransport, Transport, receive_bytes, send_bytes
from penstock.wire import FEEDER

# timeout for a verdict after a broken connection: the silence limit, two beats and one hanging store call
_REASON_S = 9.0
# timeout for dismissing all other ranks; if a rank does not answer, the verdict on it arrives earlier
DISMISS_S = 10.0


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="leave", forbid_unknown_fields=True):
    """Rank 0's dismissal of another rank; `message` is for people at that machine."""

    message: str = ""
    again: bool = False  # the run forms another group after this one


class Workers(Protocol):
    """Workers that this process started to run stages: processes or threads."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers; empty for threads."""

    def exits(self) -> list[WorkerExit]:
        """Return the workers that have exited by themselves."""

    def stop(self, grace_s: float) -> None:
        """Wait for the workers to exit, then kill those that have not."""


@dataclass
class World:
    """A process group as seen by one rank: its transport, its health and its workers, if any.

    Rank 0 is the driver. In a world that this process created, rank 0 is only the driver and the other ranks are
    `workers`; under torchrun rank 0 is also the first device. With `followed` the other ranks serve jobs of rank 0; the
    end of rank 0's `with` block dismisses them and sends its `last_word`, a message for people at their machines.

    Example:
        with start_local(2) as world:
            deployment = Deployment(world, ...)
    """

    transport: MeteredTransport
    health: Health
    names: list[str]
    devices: list[int]
    store: Store
    bandwidths: list[float | None]  # bytes per second of each rank's link; None if unknown
    workers: Workers | None = None
    hosts: list[str] = field(default_factory=list)  # name of each rank's machine, as in plans
    position: int = 0  # index of this process on its machine, whose processes may share GPUs
    between_gpus: str = "host"  # backend for tensors between GPUs: see `transport/nccl.py`
    cores: int | None = None  # number of cores in this process's share of its machine; None without torchrun
    secured: bool = False  # connections are authenticated with a key and encrypted
    followed: bool = False
    last_word: str = ""
    reason_s: float = _REASON_S
    clock: Clock = time.perf_counter  # clock for everything that this process records
    worker_ranks: Mapping[int, int] | None = None  # rank of each of `workers` by index; None: index + 1
    membership: Membership | None = None  # set if the run continues in a new group after losing a rank
    served: Store | None = None  # store that this process serves for the workers that it started
    folder: PrivateFolder | None = None  # rendezvous of these workers, if it is a folder
    unlike: Mapping[int, frozenset[str]] = field(default_factory=dict)  # operators that differ in a rank's torch
    random_states: RandomStates = field(default_factory=RandomStates)  # of this rank's global generators

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.transport.rank

    def rank_of_worker(self, index: int) -> int | None:
        """Return the rank of a worker that this process started; None if it has left this group."""
        return index + 1 if self.worker_ranks is None else self.worker_ranks.get(index)

    def check(self) -> None:
        """Raise if any process of the world has failed; quick enough to be called while waiting."""
        if self.workers is not None and self.health.failure is None:
            gone = next((each for each in self.workers.exits() if self.rank_of_worker(each.index) is not None), None)
            if gone is not None:
                # the worker's own report, if it could write one, is more precise than the exit status
                self.health.wait_for_failure(1.0)
                rank = self.rank_of_worker(gone.index) or FEEDER
                self.health.announce(Verdict(rank=rank, message=f"{self.names[rank]} {gone}", lost=True))
        self.health.check()

    def explain(self, error: TransportError) -> PenstockError:
        """Return the cause of a transport error, and report it to all ranks.

        A broken connection is only a symptom: the cause is the verdict of the group, which may take
        a moment, or the error itself if no verdict arrives.
        """
        deadline = time.monotonic() + self.reason_s
        while isinstance(error, ConnectionBroken):
            try:
                self.check()
            except PenstockError as reason:
                return reason
            if not self.health.watching or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self.health.report(error)
        return error

    def raise_cause(self, error: TransportError) -> NoReturn:
        """Raise the cause of a transport error, without the traceback of the error, which is only a symptom."""
        cause = self.explain(error)
        raise cause from cause.__cause__

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Replace a `TransportError` by its cause, and report other errors to all ranks, so that none hangs.

        Errors with `everywhere` set are raised on every rank, and the group continues afterwards.
        """
        try:
            yield
        except TransportError as error:
            self.raise_cause(error)
        except Exception as error:
            if not (isinstance(error, PenstockError) and error.everywhere):
                self.health.report(error)
            raise

    def dismiss(self, message: str = "", deadline_s: float = DISMISS_S, *, again: bool = False) -> None:
        """Dismiss every other rank, with a message for people at its machine; with `again` the run forms another group.

        Waits until all have acknowledged: this process may serve the store, and if it closed the store early, a rank
        that has not read the dismissal yet would see a failure. Warns if a rank does not answer, with the group's
        verdict if there is one.
        """
        if self.health.failure is not None:
            return
        problem: list[TransportError] = []

        def say() -> None:
            try:
                _say_leave(self.transport, Leave(message=message, again=again))
            except TransportError as error:
                problem.append(error)

        thread = threading.Thread(target=say, name="penstock-leave", daemon=True)
        thread.start()
        thread.join(deadline_s)
        if thread.is_alive():
            self.transport.abort()
            thread.join(deadline_s)
        if problem:
            self.health.wait_for_verdict(0.5)
            failure = self.health.failure
            reason = failure.message if failure else f"no answer for {deadline_s:g} s"
            warnings.warn(f"the work is done, but not every process shut down cleanly: {reason}", stacklevel=2)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Close the world as leaving a `with` block does: dismiss the followers, or report the error."""
        try:
            if error is not None:
                self.health.report(error)
            elif self.followed and self.rank == FEEDER:
                self.dismiss(self.last_word)
        finally:
            self.close()

    def become(self, following: "World") -> None:
        """Switch this world to a new process group in place; references to it and to its transport stay valid.

        State of this process itself is unchanged.
        """
        self.transport.become(following.transport.inner)
        for name in _OF_A_GROUP:
            setattr(self, name, getattr(following, name))

    def close(self, grace_s: float = 5.0) -> None:
        """End the workers and close every connection, even if closing one of them fails."""
        with contextlib.ExitStack() as ends:  # called in reverse order of these lines
            if self.folder is not None:
                ends.callback(self.folder.close)
            if self.served is not None:
                ends.callback(close_store, self.served)
            ends.callback(self.transport.close)
            if self.workers is not None:
                ends.callback(self.workers.stop, grace_s)
            ends.callback(self.health.close)
            if self.membership is not None and self.membership.roll is not None:
                ends.callback(self.membership.roll.end)


# fields of a world that belong to its process group
_OF_A_GROUP = (
    "health", "names", "devices", "store", "bandwidths", "workers", "hosts", "worker_ranks", "membership", "unlike",
)  # fmt: skip


def _say_leave(transport: Transport, leave: Leave) -> None:
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    for rank in others:
        send_bytes(transport, msgspec.json.encode(leave), rank)
    for rank in others:
        receive_bytes(transport, rank, limit=WORD_BYTES)


def assign_stages(world: World, num_stages: int) -> list[int]:
    """Assign stages to ranks in contiguous groups whose sizes differ by at most one; return the rank of each stage."""
    if num_stages < 1:
        raise UsageError(f"the number of stages must be at least 1; got {num_stages}")
    devices = world.devices
    each, more = divmod(num_stages, len(devices))
    ranks: list[int] = []
    for position, rank in enumerate(devices):
        ranks += [rank] * (each + (position < more))
    return ranks


class Streams(Protocol):
    """Deployed stages, such as a `Deployment`."""

    def abandon(self) -> None:
        """Stop immediately, without waiting for work in flight."""


def end_when_dropped(owner: object, world: World, stages: Streams) -> "weakref.finalize[..., object]":
    """Stop the workers of a world once its owner is garbage-collected, or when the program ends.

    If the owner is closed explicitly, call `detach()` on the result.
    """
    return weakref.finalize(owner, _end, world, stages, os.getpid())


def failed() -> BaseException | None:
    """Return the exception that ends this program, or None for a normal exit."""
    problem: BaseException | None = getattr(sys, "last_value", None)
    return problem


def _end(world: World, stages: Streams, process: int) -> None:
    if os.getpid() != process:
        return  # a fork: the workers' connections belong to its parent

    def end() -> None:
        stages.abandon()
        world.transport.abort()
        world.close(0.0)  # workers without a driver have nothing to finish

    if threading.main_thread().is_alive():
        # garbage collection may run on any thread, even one that `end` would wait for
        threading.Thread(target=end, name="penstock-drop", daemon=True).start()
    else:  # at exit: since Python 3.12 no thread can be started then
        end()
