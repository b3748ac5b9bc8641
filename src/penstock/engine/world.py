"""The processes that work together: who they are, how they find each other, how they end."""

import contextlib
import datetime
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from penstock.cluster.launch import LocalWorkers, WorkerExit
from penstock.engine.cores import keep_to_share
from penstock.engine.faulty import wrap_if_faulty
from penstock.engine.gloo import GlooTransport, local_address
from penstock.engine.health import Health, Verdict
from penstock.engine.transport import Transport
from penstock.errors import ConnectionBroken, PenstockError, RunError, TransportError, UsageError
from penstock.tracing.record import Clock

FEEDER = 0
# a script that makes several pipelines joins several times; all its processes count alike
_joins = itertools.count()
# where they meet if torchrun gives no place: kept, since others may join again before this process does
_serving: dict[tuple[str, int], TCPStore] = {}
LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = datetime.timedelta(seconds=5)
# after a broken connection, the time in which a verdict must come: silence, two beats, and a store that hangs
_REASON_S = 9.0


class Workers(Protocol):
    """What this process has started to do the stages' work: processes, or threads of its own."""

    @property
    def pids(self) -> list[int]:
        """The ids of the processes; none where they are threads."""

    def exited(self) -> WorkerExit | None:
        """Give the first one that has ended by itself, or None."""

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
    between_gpus: str = "gloo"  # how tensors go there: see `engine/nccl.py`
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
                self.health.announce(Verdict(gone.index + 1, f"{self.names[gone.index + 1]} {gone}", lost=True))
        self.health.check()

    def explain(self, error: TransportError) -> PenstockError:
        """Give the reason behind an error and tell it to everybody.

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


def under_torchrun() -> bool:
    """Tell whether torchrun, or something that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def join_torchrun() -> World:
    """Join the processes that torchrun started; raises `RunError` when they do not all come."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def connect(serve: bool, timeout: datetime.timedelta) -> TCPStore:
        try:
            return TCPStore(host, port, None, serve, timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise RunError(_store_message(host, port, serve, error)) from error

    cores = keep_to_share(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    timeout = datetime.timedelta(seconds=120)
    if rank == FEEDER and not hosted and (host, port) not in _serving:
        _serving[host, port] = connect(True, timeout)
    store = _serving.get((host, port)) or connect(False, timeout)
    prefix = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_joins)}"
    address = LOOPBACK if host in {"localhost", LOOPBACK, socket.gethostname()} else local_address(host)
    name = os.environ.get("PENSTOCK_HOST") or socket.gethostname()
    world = _join(
        store, connect(False, _STORE_TIMEOUT), rank, size, address, f"run{prefix}", f"rank {rank} on {name}",
        list(range(size)),
    )  # fmt: skip
    world.cores = cores
    world.position = int(os.environ.get("LOCAL_RANK", rank))
    return world


def start_local(num_workers: int, env: dict[str, str] | None = None) -> World:
    """Start fresh workers on this machine, with this process as the one that feeds them."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, None, True, datetime.timedelta(seconds=120),
        wait_for_workers=False, master_listen_fd=listener.detach(),
    )  # fmt: skip
    size = num_workers + 1
    arguments = [["--port", str(port), "--rank", str(rank), "--size", str(size)] for rank in range(1, size)]
    workers = LocalWorkers("penstock.engine.worker", arguments, {"OMP_NUM_THREADS": "1", **(env or {})})

    def watch_workers() -> None:
        gone = workers.exited()
        if gone is not None:
            raise RunError(f"worker {gone.index + 1} {gone} before it had joined; its own output above says why")

    try:
        watch = TCPStore(LOOPBACK, port, None, False, _STORE_TIMEOUT, wait_for_workers=False)
        world = _join(store, watch, FEEDER, size, LOOPBACK, "run0", "the feeding process", list(range(1, size)),
                      watch_workers)  # fmt: skip
    except BaseException:
        workers.stop(0.0)
        raise
    world.workers = workers
    return world


def join_local(port: int, rank: int, size: int) -> World:
    """Join, as a worker, the process that started this one."""
    store = TCPStore(LOOPBACK, port, None, False, datetime.timedelta(seconds=120), wait_for_workers=False)
    watch = TCPStore(LOOPBACK, port, None, False, _STORE_TIMEOUT, wait_for_workers=False)
    world = _join(store, watch, rank, size, LOOPBACK, "run0", f"worker {rank}", list(range(1, size)))
    world.position = rank - 1  # the feeding process computes nothing
    return world


def _join(
    store: Store, watch: Store, rank: int, size: int, address: str, run: str, name: str,
    devices: Sequence[int], watch_others: Callable[[], None] = lambda: None,
) -> World:  # fmt: skip
    store.set(f"penstock/{run}/name/{rank}", name)
    store.set(f"penstock/{run}/host/{rank}", os.environ.get("PENSTOCK_HOST") or socket.gethostname())
    store.set(f"penstock/{run}/bandwidth/{rank}", os.environ.get("PENSTOCK_BANDWIDTH") or "0")
    transport = wrap_if_faulty(GlooTransport(store, rank, size, address, name=run, watch=watch_others))
    names = [store.get(f"penstock/{run}/name/{other}").decode() for other in range(size)]
    hosts = [store.get(f"penstock/{run}/host/{other}").decode() for other in range(size)]
    bandwidths = [float(store.get(f"penstock/{run}/bandwidth/{other}")) or None for other in range(size)]
    health = Health(PrefixStore(run, watch), rank, names, transport.abort)
    return World(
        transport=transport, health=health, names=names, devices=list(devices), store=store,
        bandwidths=bandwidths, hosts=hosts,
    )  # fmt: skip


def _store_message(host: str, port: int, serve: bool, error: Exception) -> str:
    text = str(error).lower()
    if serve and ("address already in use" in text or "eaddrinuse" in text):
        return f"port {port} on {host} is in use; give another one with --master-port"
    return f"the first host {host}:{port} cannot be reached: {str(error).splitlines()[0][:160]}; start it first"


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
