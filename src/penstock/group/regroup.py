"""Regrouping: move a run from one process group to the next, in the same processes.

rank 0          regroup(world, lost={2})     the next group: without lost ranks, with newcomers
other ranks     next_group(world)            the same; None if the run is over
a newcomer      join_later(host, port)       the same

Each returns another world, which the caller's becomes (`World.become`) when its program is ready for it.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from penstock.errors import DeviceLost, PenstockError, RunError, UsageError
from penstock.group.addresses import local_address
from penstock.group.board import CONNECT_S, PatientStore, nobody_listens, wait_for_server
from penstock.group.entry import join_group, links_of_run, why_ended
from penstock.group.join import STORE_S, host_name
from penstock.group.launcher import JOIN
from penstock.group.liveness import Health
from penstock.group.roll_call import Membership, Rendezvous, await_call, read_run, wait_for_admission
from penstock.group.world import World
from penstock.text import first_line
from penstock.transport.base import Transport
from penstock.wire import FEEDER

# timeout of a rendezvous after a roll call; it is short, because ranks that answered the call are alive: if one is late
# all the same, rank 0 calls again
_MEET_S = 10.0
_ATTEMPTS = 5
_POLL_S = 0.2
_RETURN_S = 60.0  # how long a process that is cut off from rank 0 keeps retrying


def regroup(world: World, lost: Collection[int] = (), *, admits: bool = True, join_s: float = _MEET_S) -> World:
    """Form the next group from the survivors and the waiting newcomers, and return it.

    Rank 0 calls this, once no connection of the old group is needed any more. Without `admits`, newcomers continue to
    wait. Raises `DeviceLost` if no device is left, or after several attempts.

    Example:
        world.become(regroup(world, lost={2}))
    """
    membership = world.membership
    if membership is None or membership.roll is None:
        raise UsageError(
            "only a run that survives lost devices can form another group; start the run with on_loss='continue'"
        )
    closing = threading.Thread(target=release, args=(world.transport.inner, world.health), name="penstock-release")
    closing.start()  # concurrently, as closing may have to wait for a lost rank
    feeds_only = FEEDER not in world.devices
    expected = [name for rank, name in enumerate(membership.members) if rank not in {FEEDER, *lost}]
    for _ in range(_ATTEMPTS):
        answered = membership.roll.call(membership.generation + 1, expected, admits=admits)
        if not answered and feeds_only:
            raise DeviceLost(
                "no device is left: all workers were lost, and the driver has no stage; start again, or add machines "
                "to the run"
            )
        try:
            return _meet(world, membership, answered, join_s)
        except RunError:  # a member was lost meanwhile, or not every rank can reach a newcomer
            membership.roll.note_failure(name for name in answered if name not in expected)
            expected = [name for name in expected if name in answered]
            membership = replace(membership, generation=membership.generation + 1)
    raise DeviceLost(
        f"the surviving devices did not form a group in {_ATTEMPTS} attempts; check the network and start again"
    )


def _meet(world: World, membership: Membership, answered: list[str], join_s: float) -> World:
    """Rendezvous with the ranks that have answered, on rank 0."""
    old = {membership.members[rank]: index for index, rank in _worker_ranks(world).items()}
    worker_ranks = {old[name]: rank for rank, name in enumerate(answered, start=1) if name in old}
    workers = world.workers

    def watch() -> None:
        for gone in workers.exits() if workers is not None else []:
            if gone.index in worker_ranks:
                raise RunError(f"worker {gone.index + 1} {gone} before it joined")

    size = len(answered) + 1
    devices = range(FEEDER if FEEDER in world.devices else 1, size)
    following = join_group(
        membership.rendezvous,
        FEEDER,
        size,
        _prefix(membership.generation + 1),
        devices,
        watch,
        again=True,
        join_s=join_s,
        before=membership,
    )
    following.workers, following.worker_ranks = workers, worker_ranks
    if workers is not None:
        following.health.why_ended = partial(why_ended, following)
    return following


def release(transport: Transport, health: Health) -> None:
    """Close a group's connections; its processes stay alive for another group."""
    transport.abort()
    health.close()
    transport.close()


def next_group(world: World, *, waits: bool = True) -> World | None:
    """Wait for the run's next group and return it; None if there is none for this process.

    All ranks but rank 0 call this after releasing their old group. A process that failed by itself gets None, since it
    would fail in any group. With `waits`, a process that was left out waits to be admitted again.
    """
    membership, failure = world.membership, world.health.failure
    itself = failure is not None and failure.rank == world.rank and not failure.lost
    return None if membership is None or itself else _await(membership, membership.generation, waits=waits)


def renew(world: World) -> bool:
    """Switch a world to the run's next group, as `next_group`; return False if there is none for this process."""
    following = next_group(world)
    if following is not None:
        world.become(following)
    return following is not None


def place_to_join() -> tuple[str, int] | None:
    """Return the host and port of the training run to join, from PENSTOCK_JOIN; None if it is unset."""
    place = os.environ.get(JOIN)
    return read_place(place) if place else None


def read_place(text: str) -> tuple[str, int]:
    """Parse HOST:PORT; raises `UsageError` for anything else.

    >>> read_place("192.168.1.10:29500")
    ('192.168.1.10', 29500)
    """
    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"the run to join must be HOST:PORT, such as 192.168.1.10:29500; got {text!r}")
    return host.strip("[]"), int(port)


def join_later(host: str, port: int, patience_s: float = 120.0) -> World | None:
    """Ask a run in progress for admission and wait for it; None if the run ends first.

    Raises `RunError` if no run answers, or if it admits no newcomers.

    Example:
        world = join_later("192.168.1.10", 29500)
    """
    wait_for_server(host, port, patience_s)
    links = links_of_run(host)
    connect = partial(links.connect_store, host, port)
    own = uuid.uuid4().hex
    store = PatientStore(connect, STORE_S + CONNECT_S)
    try:
        run, generation = read_run(store, f"{host}:{port}")
        wait_for_admission(store, run, own)
    except RuntimeError as error:
        raise RunError(
            f"the run at {host}:{port} cannot be joined: {first_line(error)}; check that it is still running"
        ) from None
    finally:
        store.close()
    rendezvous = Rendezvous(links, connect, host, port, local_address(host), f"a newcomer on {host_name()}")
    membership = Membership(rendezvous=rendezvous, run=run, own=own, members=())
    return _await(membership, generation)


def _await(membership: Membership, after: int, *, waits: bool = True) -> World | None:
    """Answer roll calls until this process is in a group.

    Returns None if the run has ended, if rank 0 cannot be reached for a minute, and, without `waits`, if a group formed
    without this process.
    """
    deadline = time.monotonic() + _RETURN_S
    while True:
        store = PatientStore(membership.rendezvous.connect, STORE_S + CONNECT_S)
        try:
            found = await_call(store, membership.run, membership.own, after, waits=waits)
        except RuntimeError:  # rank 0 has exited, is stopped or cannot be reached
            if nobody_listens(membership.rendezvous.host, membership.rendezvous.port) or time.monotonic() > deadline:
                return None
            continue
        finally:
            store.close()
        if found is None:
            return None
        (after, members), deadline = found, time.monotonic() + _RETURN_S
        size = len(members) + 1
        try:
            return join_group(
                membership.rendezvous,
                members.index(membership.own) + 1,
                size,
                _prefix(after),
                range(size),
                join_s=_MEET_S,
                before=replace(membership, generation=after - 1),
            )
        except PenstockError:  # rank 0 calls another group, or has exited
            continue


def _worker_ranks(world: World) -> dict[int, int]:
    """Return the ranks of the workers that this process started, by index."""
    if world.workers is None:
        return {}
    ranks = {index: world.rank_of_worker(index) for index in range(len(world.workers.pids))}
    return {index: rank for index, rank in ranks.items() if rank is not None}


def _prefix(generation: int) -> str:
    return f"again{generation}"


def wait_for_newcomers(world: World, count: int, wait_s: float = 0.0, check: Callable[[], None] = lambda: None) -> bool:
    """Wait until this many newcomers have requested admission; False on timeout.

    Rank 0 calls this. `check` is called periodically, and may raise.
    """
    roll = world.membership.roll if world.membership is not None else None
    deadline = time.monotonic() + wait_s
    while roll is not None:
        if len(roll.waiting()) >= count:
            return True
        if time.monotonic() >= deadline:
            break
        check()
        time.sleep(_POLL_S)
    return False


class Following:
    """A background thread that forms the next group after a failure that the run survives.

    When a group fails, the program may be computing, loading data or writing a file. The next group forms meanwhile,
    without waiting for the program, which gets it from `newest`.

        verdict ──▶ abort connections ──▶ roll call, rendezvous (`group/regroup.py`) ──▶ newest

    Example:
        following = Following(world)
        ...                            # receiving a message failed with `error`
        world.become(following.newest(error))

    `following_group` returns the group after one that has failed.
    """

    def __init__(self, world: World, following_group: Callable[[World], World] | None = None) -> None:
        self._world = world  # the newest group
        self._following_group = following_group or _following_group
        self._problem: PenstockError | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        world.health.when_failed(self._ended)

    def newest(self, error: PenstockError) -> World:
        """Wait until the group after the one in which `error` occurred has formed, and return it.

        Raises `error` if the run forms no further group, or the error that prevented the next group from forming.
        """
        with self._changed:
            self._changed.wait_for(self._is_settled)
            if self._problem is not None:
                raise self._problem from error
            if self._world.health.failure is not None:
                raise error
            return self._world

    def close(self) -> None:
        """Form no further group."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _is_settled(self) -> bool:
        """Return whether no further group is forming or due after the newest one."""
        if self._thread is not None:
            return False
        return self._problem is not None or self._closed or not outlives(self._world)

    def _ended(self) -> None:
        """Start forming the next group after the verdict on a group, if the run survives."""
        with self._changed:
            if self._closed or self._thread is not None or not outlives(self._world):
                return
            self._thread = threading.Thread(target=self._form, name="penstock-following", daemon=True)
            self._thread.start()

    def _form(self) -> None:
        """Form the next group; if it has failed by then and the run survives that, form another."""
        while True:
            try:
                following = self._following_group(self._world)
            # any error at all: callers of `newest` wait for this thread
            except BaseException as error:
                with self._changed:
                    self._problem, self._thread = _as_ours(error), None
                    self._changed.notify_all()
                return
            with self._changed:
                self._world = following
            following.health.when_failed(self._ended)
            with self._changed:
                if self._closed or not outlives(following):
                    self._thread = None
                    self._changed.notify_all()
                    return


def outlives(world: World) -> bool:
    """Return whether the run continues after the verdict on a group, with this process in it."""
    failure = world.health.failure
    if failure is None or world.membership is None:
        return False
    return failure.again or ((failure.lost or failure.memory) and failure.rank not in {FEEDER, world.rank})


def _as_ours(error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    ours = RunError(
        f"the next group of processes did not form: {type(error).__name__}: {first_line(error)}; start again from the "
        "last checkpoint"
    )
    ours.__cause__ = error
    return ours


def _following_group(world: World) -> World:
    """Return the group after one that has failed; raises `DeviceLost` if this process is in none."""
    failure = world.health.failure
    if failure is None:
        raise DeviceLost("a regroup was requested without a failure; continue with the current group")
    if world.rank == FEEDER:
        return regroup(world, set() if failure.again else {failure.rank}, admits=failure.again)
    release(world.transport.inner, world.health)
    if (following := next_group(world, waits=False)) is None:
        raise DeviceLost(
            f"{failure.message}, and this process was not admitted to another group; if the others continued, start it "
            "again to join them"
        )
    return following
