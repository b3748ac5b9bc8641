"""The processes that work together: who they are, how they find each other, how they end."""

import datetime
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from penstock.cluster.launch import LocalWorkers
from penstock.engine.gloo import GlooTransport, local_address
from penstock.engine.health import Health
from penstock.engine.transport import Transport
from penstock.errors import DeviceLost, PenstockError, RunError, TransportError, UsageError

FEEDER = 0
# a script that makes several pipelines joins several times; all its processes count alike
_joins = itertools.count()
LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = datetime.timedelta(seconds=5)
# after a broken connection, the time in which a verdict must come: silence, two beats, and a store that hangs
_REASON_S = 9.0


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
    workers: LocalWorkers | None = None
    close_store: Callable[[], None] | None = None

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
                raise DeviceLost(f"{self.names[gone.index + 1]} {gone}; its results so far are complete")
        self.health.check()

    def explain(self, error: TransportError) -> PenstockError:
        """Give the reason behind a broken connection: the verdict of the group, or the error itself."""
        try:
            if self.workers is not None:
                self.check()
            self.health.wait_for_failure(_REASON_S)
        except PenstockError as reason:
            return reason
        return error

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

    store = connect(rank == FEEDER and not hosted, datetime.timedelta(seconds=120))
    prefix = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_joins)}"
    address = LOOPBACK if host in {"localhost", LOOPBACK, socket.gethostname()} else local_address(host)
    name = os.environ.get("PENSTOCK_HOST") or socket.gethostname()
    return _join(
        store, connect(False, _STORE_TIMEOUT), rank, size, address, f"run{prefix}", f"rank {rank} on {name}",
        list(range(size)),
    )  # fmt: skip


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
    try:
        watch = TCPStore(LOOPBACK, port, None, False, _STORE_TIMEOUT, wait_for_workers=False)
        world = _join(store, watch, FEEDER, size, LOOPBACK, "run0", "the feeding process", list(range(1, size)))
    except BaseException:
        workers.stop(0.0)
        raise
    world.workers = workers
    return world


def join_local(port: int, rank: int, size: int) -> World:
    """Join, as a worker, the process that started this one."""
    store = TCPStore(LOOPBACK, port, None, False, datetime.timedelta(seconds=120), wait_for_workers=False)
    watch = TCPStore(LOOPBACK, port, None, False, _STORE_TIMEOUT, wait_for_workers=False)
    return _join(store, watch, rank, size, LOOPBACK, "run0", f"worker {rank}", list(range(1, size)))


def _join(
    store: Store, watch: Store, rank: int, size: int, address: str, run: str, name: str,
    devices: Sequence[int],
) -> World:  # fmt: skip
    store.set(f"penstock/{run}/name/{rank}", name)
    transport = GlooTransport(store, rank, size, address, name=run)
    names = [store.get(f"penstock/{run}/name/{other}").decode() for other in range(size)]
    health = Health(PrefixStore(run, watch), rank, names, transport.abort)
    return World(transport=transport, health=health, names=names, devices=list(devices))


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
