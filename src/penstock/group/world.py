"""The processes that work together: who they are, how they find each other, how they end."""

import contextlib
import datetime
import errno
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken, PenstockError, RunError, TransportError, UsageError
from penstock.group.addresses import LOOPBACK, first_address, is_everywhere, local_address
from penstock.group.board import connect_store, serve_store, wait_for_server
from penstock.group.cores import keep_to_share
from penstock.group.join import JOIN_S, Meeting, host_name
from penstock.group.launch import LocalWorkers, WorkerExit
from penstock.group.liveness import Health, Verdict
from penstock.tracing.record import Clock
from penstock.transport.base import FEEDER, WORD_BYTES, Transport, receive_bytes, send_bytes
from penstock.transport.faulty import wrap_if_faulty
from penstock.transport.gloo import GlooTransport
from penstock.transport.watched import run_watched

# a script that makes several pipelines joins several times; all its processes count alike
_joins = itertools.count()
# where they meet if torchrun gives no place: kept, since others may join again before this process does
_serving: dict[tuple[str, int], TCPStore] = {}
WORKER = "penstock.deploy.worker"
BIND = "PENSTOCK_BIND"  # the address that this process and those that it starts listen on
# what gloo waits for while it connects
_STORE_TIMEOUT = datetime.timedelta(seconds=60)
# after a broken connection, the time in which a verdict must come: silence, two beats, and a store that hangs
_REASON_S = 9.0
# in which every other process hears that it may leave: a verdict on one that does not comes sooner
DISMISS_S = 10.0


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="leave", forbid_unknown_fields=True):
    """There is no more to do; `message` is for people at that machine."""

    message: str = ""


class Workers(Protocol):
    """What this process has started to do the stages' work: processes, or threads of its own."""

    @property
    def pids(self) -> list[int]:
        """The ids of the processes; none where they are threads."""

    def exited(self) -> WorkerExit | None:
        """Return the first one that has ended by itself, or None."""

    def stop(self, grace_s: float) -> None:
        """Wait for their end, and bring it about where it does not come."""


@dataclass
class World:
    """One group of processes, seen from one of them: its transport, its health, and its workers if it has any.

    Rank 0 feeds. In a world that this process made itself, rank 0 only feeds and the others are
    `workers`; under torchrun rank 0 is also the first device.
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
    reason_s: float = _REASON_S
    clock: Clock = time.perf_counter  # of everything that is recorded in this process

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.transport.rank

    def check(self) -> None:
        """Raise if any process of the world has failed; quick enough to be called while waiting."""
        if self.workers is not None and self.health.failure is None:
            gone = self.workers.exited()
            if gone is not None:
                # its own report, if it could write one, says more than the exit status
                self.health.wait_for_failure(1.0)
                rank = gone.index + 1
                self.health.announce(Verdict(rank=rank, message=f"{self.names[rank]} {gone}", lost=True))
        self.health.check()

    def explain(self, error: TransportError) -> PenstockError:
        """Return the reason behind an error and tell it to everybody.

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

    def dismiss(self, message: str = "", deadline_s: float = DISMISS_S) -> None:
        """Tell every other rank that there is no more to do, with a last word to people at that machine.

        Waits until all have heard it: this process may hold the store, whose end would look like a failure to a rank
        that is still on its way here. One that does not answer any more is not waited for, but named in a warning.
        """
        if self.health.failure is not None:
            return
        problem: list[TransportError] = []

        def say() -> None:
            try:
                _say_leave(self.transport, message)
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

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Tell everybody what goes wrong inside, and let go of the world behind it."""
        try:
            yield
        except BaseException as error:
            self.health.report(error)
            raise
        finally:
            self.close()

    def close(self, grace_s: float = 5.0) -> None:
        """End the workers and let go of every connection."""
        self.health.close()
        if self.workers is not None:
            self.workers.stop(grace_s)
        self.transport.close()


def _say_leave(transport: Transport, message: str) -> None:
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    for rank in others:
        send_bytes(transport, msgspec.json.encode(Leave(message=message)), rank)
    for rank in others:
        receive_bytes(transport, rank, limit=WORD_BYTES)


def under_torchrun() -> bool:
    """Return whether torchrun, or something that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def own_address() -> str:
    """Return where processes of this machine alone meet: loopback, unless another address was chosen."""
    return _chosen_address() or LOOPBACK


def _chosen_address() -> str | None:
    """Return the address that was chosen to listen on; raises `UsageError` where that is all of this machine's."""
    chosen = os.environ.get(BIND) or None
    if chosen is not None and is_everywhere(chosen):
        raise UsageError(f"{BIND} is one address of this machine, and {chosen} means all of them; see `ip address`")
    return chosen


def join_torchrun() -> World:
    """Join the processes that torchrun started; raises `RunError` when they do not all come."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    cores = keep_to_share(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    all_here, chosen = os.environ.get("LOCAL_WORLD_SIZE") == str(size), _chosen_address()
    # processes of one machine have been given one address, and the first of them serves the store there
    first = chosen if chosen and all_here and not hosted else first_address(host, all_here=all_here)
    address = chosen or local_address(first)
    if rank == FEEDER and not hosted:
        first = address
        if (host, port) not in _serving:
            _serving[host, port] = _serve(address, host, port)
    else:
        wait_for_server(first, port, JOIN_S)
    prefix = f"run{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_joins)}"
    world = _join(
        lambda: connect_store(first, port, _STORE_TIMEOUT), rank, size, address, prefix,
        f"rank {rank} on {host_name()}", list(range(size)),
    )  # fmt: skip
    world.cores = cores
    world.position = int(os.environ.get("LOCAL_RANK", rank))
    return world


def start_local(
    num_workers: int, env: dict[str, str] | None = None, module: str = WORKER, arguments: Sequence[str] = ()
) -> World:
    """Start fresh workers on this machine, with this process as the one that feeds them.

    `module` is the program that they run, which ends as `penstock.deploy.worker` does, with `arguments` of its own.
    """
    address = own_address()
    store = serve_store(address)
    size, port = num_workers + 1, store.port
    own = [["--port", str(port), "--rank", str(rank), "--size", str(size), *arguments] for rank in range(1, size)]
    workers = LocalWorkers(module, own, {"OMP_NUM_THREADS": "1", **(env or {})})

    def watch_workers() -> None:
        gone = workers.exited()
        if gone is not None:
            raise RunError(f"worker {gone.index + 1} {gone} before it had joined; its own output above says why")

    try:
        world = _join(
            lambda: store, FEEDER, size, address, "run", "the feeding process", list(range(1, size)), watch_workers
        )
    except BaseException:
        workers.stop(0.0)
        raise
    world.workers = workers
    world.health.why_ended = partial(_why_ended, workers)
    return world


def join_local(port: int, rank: int, size: int) -> World:
    """Join, as a worker, the process that started this one."""
    address = own_address()
    world = _join(
        lambda: connect_store(address, port), rank, size, address, "run", f"worker {rank}", list(range(1, size))
    )
    world.position = rank - 1  # the feeding process computes nothing
    return world


def _join(
    connect: Callable[[], Store], rank: int, size: int, address: str, prefix: str, name: str,
    devices: Sequence[int], watch_others: Callable[[], None] = lambda: None,
) -> World:  # fmt: skip
    meeting = Meeting(connect, rank, size, address=address, prefix=prefix, name=name, watch=watch_others)
    names = [hello.name for hello in meeting.hellos]
    health = Health(meeting.boards, rank, names, lambda: None)

    def watch() -> None:
        watch_others()
        health.check()

    try:
        store = PrefixStore(f"penstock/{meeting.name}", run_watched(connect, watch, JOIN_S))
        transport = wrap_if_faulty(GlooTransport(store, rank, size, address, watch=watch))
    except BaseException as error:
        health.report(error)  # who leaves without a word seems to leave in order
        health.close()
        raise
    health.call_instead(transport.abort)
    return World(
        transport=transport, health=health, names=names, devices=list(devices), store=store,
        bandwidths=[hello.bandwidth_bytes_per_s for hello in meeting.hellos],
        hosts=[hello.host for hello in meeting.hellos],
    )  # fmt: skip


def _why_ended(workers: LocalWorkers, rank: int) -> str | None:
    """Say how the process of a rank has ended, where this one started it."""
    return next((str(gone) for gone in workers.exits() if gone.index + 1 == rank), None)


def _serve(address: str, host: str, port: int) -> TCPStore:
    try:
        return serve_store(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; give another one with --master-port"
        else:
            message = (
                f"{address}:{port} cannot be listened on ({error.strerror or error}); --master-addr is the first "
                "host's own address, and --bind another one of it"
            )
        raise RunError(message) from None


def check_world(world: World, num_stages: int) -> list[int]:
    """Place stages on devices in contiguous groups, as even as they can be; gives a rank per stage."""
    if num_stages < 1:
        raise UsageError(f"the number of stages must be at least 1, not {num_stages}")
    devices = world.devices
    each, more = divmod(num_stages, len(devices))
    ranks: list[int] = []
    for position, rank in enumerate(devices):
        ranks += [rank] * (each + (position < more))
    return ranks
