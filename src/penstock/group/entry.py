"""Entry points to a world: processes started by torchrun, and new workers on this machine."""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from penstock.errors import PenstockError, RunError, TransportError, UsageError
from penstock.group.addresses import (
    BIND,
    LOOPBACK,
    PrivateFolder,
    first_address,
    is_everywhere,
    is_folder,
    local_address,
)
from penstock.group.board import wait_for_server
from penstock.group.join import JOIN_S, Meeting, host_name
from penstock.group.launcher import KEY, TRUSTED, LocalWorkers, launcher_variables, read_launched
from penstock.group.links import Links, PlainLinks, choose_links, close_store
from penstock.group.liveness import WATCHFUL_S, Boards, Health
from penstock.group.roll_call import Membership, Rendezvous, RollCall
from penstock.group.world import World
from penstock.resources import keep_to_share
from penstock.terminal.progress import working
from penstock.text import first_line, note
from penstock.transport.base import SILENCE_S, MeteredTransport, Transport, receive_bytes, send_bytes
from penstock.transport.faulty import wrap_if_faulty
from penstock.transport.memory_network import MemoryNetwork
from penstock.wire import FEEDER

# number of the next join: a script joins once for each of its pipelines, in the same order in every process
_joins = itertools.count()
# set once this process has joined a group of torchrun's: from then on its errors are reported to all ranks
has_joined = threading.Event()
# stores that rank 0 serves if torchrun serves none. Kept alive, since other ranks may begin the next join before rank 0
_serving: dict[tuple[str, int], TCPStore] = {}
# links by the value of PENSTOCK_KEY; addresses that are folders share the entry "/". Kept alive, because the stores
# above are served through them
_links: dict[str, Links] = {}
WORKER = "penstock.deploy.worker"
_REASON_S = 2.0  # timeout for the reason of a broken connection


def under_torchrun() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process.

    In a process of Slurm or MPI, this first sets these variables from theirs: `srun python script.py` is enough.

    Raises `UsageError` for values that cannot be.
    """
    if "RANK" not in os.environ:
        os.environ.update(launcher_variables(os.environ))
    return read_launched(os.environ) is not None


def links_of_run(address: str) -> Links:
    """Return this process's links for a run whose rendezvous is at an address.

    Raises `UsageError` if the key is not usable.
    """
    kind = "/" if is_folder(address) else os.environ.get(KEY, "")
    if kind not in _links:
        _links[kind] = choose_links(address)
    return _links[kind]


def own_address() -> str:
    """Return the address for a run on this machine alone: loopback, unless another address was chosen."""
    return _chosen_address() or LOOPBACK


def meeting_place() -> tuple[str, PrivateFolder | None]:
    """Return the rendezvous of local workers: the path of a private folder for Unix domain sockets, and the folder.

    If PENSTOCK_KEY is set, or PENSTOCK_BIND is a network address, returns a network address and None.
    """
    chosen = _chosen_address()
    if os.environ.get(KEY) or (chosen is not None and not is_folder(chosen)):
        return own_address(), None
    folder = PrivateFolder()
    return folder.path, folder


def _chosen_address() -> str | None:
    """Return the address of PENSTOCK_BIND; raises `UsageError` if it means all addresses of this machine."""
    chosen = os.environ.get(BIND) or None
    if chosen is not None and is_everywhere(chosen):
        raise UsageError(f"{BIND} must be one address of this machine, but {chosen} means all; see `ip address`")
    return chosen


def join_torchrun(*, followed: bool = False, again: bool = False) -> World:
    """Join the processes that torchrun started.

    With `followed` the other ranks serve jobs of rank 0 until it dismisses them. With `again` on rank 0, the run forms
    a new group after a rank is lost (`group/regroup.py`), unless torchrun's agents serve the store: they end all
    processes when one is lost.

    Raises `RunError` if a rank does not join.
    """
    launched = read_launched(os.environ)
    if launched is None:
        raise UsageError("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set; start with torchrun")
    rank, size, host, port = launched.rank, launched.size, launched.host, launched.port
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    cores = keep_to_share(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    all_here, chosen = os.environ.get("LOCAL_WORLD_SIZE") == str(size), _chosen_address()
    if hosted and os.environ.get(KEY):
        raise UsageError(
            f"a key cannot be used if torchrun's agents serve the store, which does not check it; leave {KEY} out, or "
            "start with penstock hosts run"
        )
    # processes of one machine share one chosen address, and rank 0 serves the store on it
    first = chosen if chosen and all_here and not hosted else first_address(host, all_here=all_here)
    address = chosen or local_address(first)
    links = links_of_run(first)
    if rank == FEEDER and not hosted:
        first = address
        if (host, port) not in _serving:
            _serving[host, port] = _serve(links, address, host, port, size - 1)
    else:
        wait_for_server(first, port, JOIN_S)
    if rank == FEEDER and not all_here and not links.secured and not os.environ.get(TRUSTED):
        note(
            "this run has no key: anyone on its network can read and change it; penstock hosts run creates a key, "
            f"and {TRUSTED}=1 marks the network as trusted"
        )
    prefix = f"run{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_joins)}"
    connect = partial(links.connect_store, first, port)
    rendezvous = Rendezvous(links, connect, first, port, address, f"rank {rank} on {host_name()}")
    survives = again and not hosted
    with working(f"connecting {size} processes", shown=rank == FEEDER and size > 1):
        world = join_group(
            rendezvous,
            rank,
            size,
            prefix,
            range(size),
            again=survives,
            silence_s=WATCHFUL_S if survives and followed else SILENCE_S,
        )
    has_joined.set()
    world.cores = cores
    world.followed = followed
    world.position = int(os.environ.get("LOCAL_RANK", rank))
    return world


def start_local(
    num_workers: int,
    env: dict[str, str] | None = None,
    module: str = WORKER,
    arguments: Sequence[str] = (),
    *,
    again: bool = False,
    over_network: bool = False,
) -> World:
    """Start new workers on this machine, with this process as the driver.

    The workers run `module` with extra `arguments`; like `penstock.deploy.worker`, the module must exit when this
    process does (`leave_with_parent`). With `again` the run forms a new group after a rank is lost. The processes
    connect through a private folder (`meeting_place`), or with `over_network` like processes of several machines.
    """
    address, folder = meeting_place() if not over_network else (own_address(), None)
    with working("starting the workers"), contextlib.ExitStack() as where_it_fails:
        if folder is not None:
            where_it_fails.callback(folder.close)
        links = links_of_run(address)
        store = links.serve_store(address, peers=num_workers)
        where_it_fails.callback(close_store, store)
        size, port = num_workers + 1, store.port
        own = [["--port", str(port), "--rank", str(rank), "--size", str(size), *arguments] for rank in range(1, size)]
        workers = LocalWorkers(module, own, {"OMP_NUM_THREADS": "1", BIND: address, **(env or {})})
        where_it_fails.callback(workers.stop, 0.0)

        def watch_workers() -> None:
            gone = workers.exited()
            if gone is not None:
                raise RunError(f"worker {gone.index + 1} {gone} before it joined; see its output above for the reason")

        connect = (lambda: store) if isinstance(links, PlainLinks) else partial(links.connect_store, address, port)
        rendezvous = Rendezvous(links, connect, address, port, address, "the driver")
        world = join_group(
            rendezvous,
            FEEDER,
            size,
            "run",
            range(1, size),
            watch_workers,
            again=again,
            silence_s=WATCHFUL_S if again else SILENCE_S,
        )
        where_it_fails.pop_all()
    world.workers, world.served, world.folder = workers, store, folder
    world.followed = True
    world.health.why_ended = partial(why_ended, world)
    return world


def join_local(port: int, rank: int, size: int) -> World:
    """Join the parent process as a worker."""
    address = own_address()
    links = links_of_run(address)
    connect = partial(links.connect_store, address, port)
    rendezvous = Rendezvous(links, connect, address, port, address, f"worker {rank}")
    world = join_group(rendezvous, rank, size, "run", range(1, size))
    world.position = rank - 1  # the driver computes nothing
    return world


def thread_worlds(names: Sequence[str]) -> list[World]:
    """Create a world for each of several threads of this process, connected through memory; rank 0 is the driver.

    With one name, rank 0 is both driver and device.
    """
    network, store = MemoryNetwork(len(names)), HashStore()
    return [
        World(
            transport=MeteredTransport(transport),
            names=list(names),
            devices=list(range(1, len(names))) or [FEEDER],
            store=store,
            health=Health(Boards.of_threads(store, rank, len(names)), rank, list(names), transport.abort),
            bandwidths=[None] * len(names),
        )
        for rank, transport in enumerate(network.transports)
    ]


def join_group(
    rendezvous: Rendezvous,
    rank: int,
    size: int,
    prefix: str,
    devices: Sequence[int],
    watch_others: Callable[[], None] = lambda: None,
    *,
    again: bool = False,
    join_s: float = JOIN_S,
    before: Membership | None = None,
    silence_s: float = SILENCE_S,
) -> World:
    """Rendezvous with the other processes of a group and connect to them.

    `before` is the membership in an earlier group, if any. Raises `RunError` if a rank does not join, and `DeviceLost`
    if a rank is lost meanwhile.
    """
    own, silence_s = (before.own, before.silence_s) if before is not None else (None, silence_s)
    meeting = Meeting(
        rendezvous,
        rank,
        size,
        prefix=prefix,
        watch=watch_others,
        join_s=join_s,
        again=again,
        own=own,
        silence_s=silence_s,
    )
    names = [hello.name for hello in meeting.hellos]
    health = Health(meeting.boards, rank, names, lambda: None, silence_s=meeting.silence_s)

    def watch() -> None:
        watch_others()
        health.check()

    with contextlib.ExitStack() as where_it_fails:
        where_it_fails.callback(health.close)
        try:
            made, store = _connect(rendezvous, meeting.name, rank, size, join_s, watch)
            where_it_fails.callback(made.close)
            transport = wrap_if_faulty(made)
            health.when_failed(transport.abort)
            if before is not None:
                _wait_for_all(transport, health)
        except BaseException as error:
            # `health.close` announces an orderly exit, so the error must be reported first; a run that was forming its
            # next group here (`before`) tries again with the ranks that answer
            health.report(error, again=before is not None and isinstance(error, PenstockError))
            raise
        where_it_fails.pop_all()
    return World(
        transport=MeteredTransport(transport),
        health=health,
        names=names,
        devices=list(devices),
        store=store,
        bandwidths=[hello.bandwidth_bytes_per_s for hello in meeting.hellos],
        hosts=[hello.host for hello in meeting.hellos],
        membership=_membership(meeting, rendezvous, before),
        secured=rendezvous.links.secured,
        unlike=meeting.unlike,
    )


def _connect(
    rendezvous: Rendezvous, name: str, rank: int, size: int, join_s: float, watch: Callable[[], None]
) -> tuple[Transport, Store]:
    """Connect to the other ranks of a group after the rendezvous; raises `RunError` on any failure."""
    try:
        return rendezvous.links.make_transport(rendezvous.connect, name, rank, size, rendezvous.address, join_s, watch)
    except PenstockError:
        raise
    # torch's store and libzmq raise different errors
    except Exception as error:
        raise RunError(
            f"rank {rank} cannot connect to the other ranks: {first_line(error)}; check that every host "
            "reaches every other, and start again"
        ) from error


def _wait_for_all(transport: Transport, health: Health) -> None:
    """Wait on rank 0 until all ranks of a group have connected; the other ranks only report that they have.

    If rank 0 did not wait, a rank that then fails to connect would end a group that is already running. After
    connecting, each other rank sends rank 0 an empty message.
    """
    try:
        if transport.rank == FEEDER:
            for rank in range(1, transport.size):
                receive_bytes(transport, rank, limit=0)
        else:
            send_bytes(transport, b"", FEEDER)
    except TransportError as error:
        health.wait_for_failure(_REASON_S)
        raise RunError(f"not all surviving processes completed the rendezvous: {error}") from error


def _membership(meeting: Meeting, rendezvous: Rendezvous, before: Membership | None) -> Membership | None:
    """Return the membership for further groups; None if the run cannot form another group."""
    if not meeting.hellos[FEEDER].again:
        return None
    members = tuple(hello.nonce for hello in meeting.hellos)
    if before is not None:
        return replace(before, members=members, generation=before.generation + 1)
    run = members[FEEDER]
    roll = RollCall(rendezvous.connect(), run) if meeting.own == run else None
    return Membership(
        rendezvous=rendezvous, run=run, own=meeting.own, members=members, roll=roll, silence_s=meeting.silence_s
    )


def why_ended(world: World, rank: int) -> str | None:
    """Return the exit reason of a rank's process; None if it runs or this process did not start it."""
    exits = world.workers.exits() if world.workers is not None else []
    return next((str(gone) for gone in exits if world.rank_of_worker(gone.index) == rank), None)


def _serve(links: Links, address: str, host: str, port: int, peers: int) -> TCPStore:
    try:
        return links.serve_store(address, port, peers)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; choose another one with --master-port"
        else:
            message = (
                f"cannot listen on {address}:{port} ({error.strerror or error}); check that --master-addr is an "
                "address of rank 0's host; if so, choose another address of that host with PENSTOCK_BIND"
            )
        raise RunError(message) from None
