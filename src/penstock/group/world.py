"""The processes that work together: who they are, how they find each other, how they end."""

import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken, PenstockError, TransportError, UsageError
from penstock.group.addresses import PrivateFolder
from penstock.group.launcher import WorkerExit
from penstock.group.links import close_store
from penstock.group.liveness import Health
from penstock.group.roll_call import Membership
from penstock.group.verdict import Verdict
from penstock.tracing.record import Clock
from penstock.transport.base import FEEDER, WORD_BYTES, Transport, receive_bytes, send_bytes

# after a broken connection, the time in which a verdict must come: silence, two beats, and a store that hangs
_REASON_S = 9.0
# in which every other process hears that it may leave: a verdict on one that does not comes sooner
DISMISS_S = 10.0


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="leave", forbid_unknown_fields=True):
    """There is no more to do; `message` is for people at that machine."""

    message: str = ""
    again: bool = False  # another group follows this one


class Workers(Protocol):
    """What this process has started to do the stages' work: processes, or threads of its own."""

    @property
    def pids(self) -> list[int]:
        """The ids of the processes; none where they are threads."""

    def exits(self) -> list[WorkerExit]:
        """Return those that have ended by themselves."""

    def stop(self, grace_s: float) -> None:
        """Wait for their end, and bring it about where it does not come."""


@dataclass
class World:
    """One group of processes, seen from one of them: its transport, its health, and its workers if it has any.

    Rank 0 feeds. In a world that this process made itself, rank 0 only feeds and the others are
    `workers`; under torchrun rank 0 is also the first device. Where the others follow, working until they are
    dismissed, the end of rank 0's `with` block dismisses them with its `last_word` to people at their machines.

    Example:
        with start_local(2) as world:
            deployment = Deployment(world, ...)
    """

    transport: Transport
    health: Health
    names: list[str]
    devices: list[int]
    store: Store
    bandwidths: list[float | None]  # bytes per second of each rank's link, where it is known
    workers: Workers | None = None
    hosts: list[str] = field(default_factory=list)  # each rank's, as plans name devices
    position: int = 0  # of this process among those of its machine, which may share GPUs
    between_gpus: str = "gloo"  # how tensors go there: see `transport/nccl.py`
    cores: int | None = None  # of this process alone, where it shares a machine with others of the same run
    secured: bool = False  # its connections prove a key and are encrypted
    followed: bool = False
    last_word: str = ""
    reason_s: float = _REASON_S
    clock: Clock = time.perf_counter  # of everything that is recorded in this process
    worker_ranks: Mapping[int, int] | None = None  # of `workers`, by index; one more where all of them are here
    membership: Membership | None = None  # where the run goes on in another group once one of this is lost
    served: Store | None = None  # by this process, for the workers that it has started
    folder: PrivateFolder | None = None  # and where they meet
    unlike: Mapping[int, frozenset[str]] = field(default_factory=dict)  # operators that a rank's torch has otherwise

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.transport.rank

    def rank_of_worker(self, index: int) -> int | None:
        """Return the rank of a worker that this process has started; None where it is not in this group any more."""
        return index + 1 if self.worker_ranks is None else self.worker_ranks.get(index)

    def check(self) -> None:
        """Raise if any process of the world has failed; quick enough to be called while waiting."""
        if self.workers is not None and self.health.failure is None:
            gone = next((each for each in self.workers.exits() if self.rank_of_worker(each.index) is not None), None)
            if gone is not None:
                # its own report, if it could write one, says more than the exit status
                self.health.wait_for_failure(1.0)
                rank = self.rank_of_worker(gone.index) or FEEDER
                self.health.announce(Verdict(rank=rank, message=f"{self.names[rank]} {gone}", lost=True))
        self.health.check()

    def explain(self, error: TransportError) -> PenstockError:
        """Return the cause of a transport error, and report it to all processes.

        A broken connection is only a symptom: the reason is the verdict of the group, which may take
        a moment, or the error itself if there is none.
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

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Replace a `TransportError` by its cause, and report other errors to all processes, so that none hangs.

        Errors with `everywhere` set are found out by every process alike, which goes on afterwards.
        """
        try:
            yield
        except TransportError as error:
            raise self.explain(error) from error
        except Exception as error:
            if not getattr(error, "everywhere", False):
                self.health.report(error)
            raise

    def dismiss(self, message: str = "", deadline_s: float = DISMISS_S, *, again: bool = False) -> None:
        """Dismiss every other rank, with a last word to people at that machine; with `again` for another group.

        Waits until all have heard it: this process may hold the store, whose end would look like a failure to a rank
        that is still on its way here. One that does not answer any more is not waited for, but named in a warning.
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
            warnings.warn(f"the work is done, but not every process has left in order: {reason}", stacklevel=2)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Let go of the world as the end of a `with` block does: dismiss who follows, or report what went wrong."""
        try:
            if error is not None:
                self.health.report(error)
            elif self.followed and self.rank == FEEDER:
                self.dismiss(self.last_word)
        finally:
            self.close()

    def become(self, following: "World") -> None:
        """Be another group from now on, of the same run: whoever has this world has that one.

        What is this process's own stays as it is.
        """
        for name in _OF_A_GROUP:
            setattr(self, name, getattr(following, name))

    def close(self, grace_s: float = 5.0) -> None:
        """End the workers and close every connection, also if closing one of them fails."""
        with contextlib.ExitStack() as ends:  # which come in the order of their lines from below
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


# what a world has of the group that it is
_OF_A_GROUP = (
    "transport", "health", "names", "devices", "store", "bandwidths", "workers", "hosts", "worker_ranks", "membership",
    "unlike",
)  # fmt: skip


def _say_leave(transport: Transport, leave: Leave) -> None:
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    for rank in others:
        send_bytes(transport, msgspec.json.encode(leave), rank)
    for rank in others:
        receive_bytes(transport, rank, limit=WORD_BYTES)


def check_world(world: World, num_stages: int) -> list[int]:
    """Assign stages to ranks in contiguous groups, as even as possible; return the rank of each stage."""
    if num_stages < 1:
        raise UsageError(f"the number of stages must be at least 1, not {num_stages}")
    devices = world.devices
    each, more = divmod(num_stages, len(devices))
    ranks: list[int] = []
    for position, rank in enumerate(devices):
        ranks += [rank] * (each + (position < more))
    return ranks


class Streams(Protocol):
    """Stages in place: a `Deployment`, or `Replicas` of one."""

    def abandon(self) -> None:
        """End at once, whatever is under way."""


def end_when_dropped(owner: object, world: World, stages: Streams) -> "weakref.finalize[..., object]":
    """End the workers of a world once nothing refers to its owner any more, or when the program ends.

    Whoever closes the owner in order calls `detach()` on what this returns.
    """
    return weakref.finalize(owner, _end, world, stages, os.getpid())


def failed() -> BaseException | None:
    """Return the exception that ends this program, or None where it ends by itself."""
    problem: BaseException | None = getattr(sys, "last_value", None)
    return problem


def _end(world: World, stages: Streams, process: int) -> None:
    if os.getpid() != process:
        return  # a fork of the process that has them: their connections are its own

    def end() -> None:
        stages.abandon()
        world.transport.abort()
        world.close(0.0)  # workers that nobody feeds any more have nothing to finish

    if threading.main_thread().is_alive():
        # garbage is collected on any thread, also on one that this would wait for
        threading.Thread(target=end, name="penstock-drop", daemon=True).start()
    else:  # the program ends, and from Python 3.12 on it starts no thread then
        end()
