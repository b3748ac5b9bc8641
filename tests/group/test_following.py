"""A process that stays in its run's newest group, whatever its own program is doing meanwhile."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import zmq
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken, DeviceLost, RunError
from penstock.group.board import Verdict
from penstock.group.links import PlainLinks
from penstock.group.liveness import Boards, Health
from penstock.group.regroup import Following, outlives
from penstock.group.roll_call import Membership, Rendezvous
from penstock.group.world import World
from penstock.transport.base import MeteredTransport, StoreSilent
from penstock.transport.memory_network import MemoryNetwork

BROKEN = ConnectionBroken("the connection to rank 2 broke")
LOST = Verdict(rank=2, message="c is gone", lost=True)
MakeWorld = Callable[[], World]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Make worlds of three processes, of which this is the second."""
    healths: list[Health] = []

    def make() -> World:
        network, store, names = MemoryNetwork(3), HashStore(), ["a", "b", "c"]
        health = Health(Boards.of_threads(store, 1, 3), 1, names, network.transports[1].abort, beat_s=0.02)
        healths.append(health)
        rendezvous = Rendezvous(PlainLinks(), HashStore, "nowhere", 1, "nowhere", "a thread")
        return World(
            transport=MeteredTransport(network.transports[1]), names=names, devices=[0, 1, 2], store=store,
            bandwidths=[None] * 3, health=health,
            membership=Membership(rendezvous=rendezvous, run="run", own="b", members=tuple(names)),
        )  # fmt: skip

    yield make
    for health in healths:
        health.close()


def test_next_group_forms_in_the_background(make_world: MakeWorld) -> None:
    world, second, third = make_world(), make_world(), make_world()
    formed: list[World] = []

    def next_group(_of: World) -> World:
        formed.append([second, third][len(formed)])
        if len(formed) == 1:  # which is lost before it is of any use
            second.health.announce(LOST)
        return formed[-1]

    following = Following(world, next_group)
    assert following.newest(BROKEN).membership is world.membership  # nothing has happened
    world.health.announce(LOST)
    deadline = time.monotonic() + 10.0
    while len(formed) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert following.newest(BROKEN).health is third.health
    with pytest.raises(ConnectionBroken):
        world.transport.send(torch.zeros(1, dtype=torch.uint8), 0, 0)
    following.close()


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(rank=1, message="b stood still", lost=True),
        Verdict(rank=0, message="a is gone", lost=True),
        Verdict(rank=2, message="c has found a mistake", lost=False),
    ],
)
def test_failures_that_end_a_run(make_world: MakeWorld, verdict: Verdict) -> None:
    world = make_world()
    following = Following(world)
    world.health.announce(verdict)
    assert not outlives(world)
    with pytest.raises(ConnectionBroken, match="rank 2"):
        following.newest(BROKEN)
    following.close()
    alone = replace(make_world(), membership=None)
    alone.health.announce(LOST)
    assert not outlives(alone)


def test_error_of_forming_a_group_is_raised(make_world: MakeWorld) -> None:
    def go_over(_of: World) -> World:
        raise DeviceLost("the others went on without this process")

    world = make_world()
    following = Following(world, go_over)
    world.health.announce(LOST)
    for _ in range(2):
        with pytest.raises(RunError, match="went on without"):
            following.newest(BROKEN)
    following.close()


@pytest.mark.parametrize("error", [RuntimeError("injected"), StoreSilent("no answer"), zmq.ZMQError(11), SystemExit(1)])
def test_an_error_of_any_kind_ends_the_wait(make_world: MakeWorld, error: BaseException) -> None:
    def go_over(_of: World) -> World:
        raise error

    world = make_world()
    following = Following(world, go_over)
    world.health.announce(LOST)
    with pytest.raises(RunError) as caught:
        following.newest(BROKEN)
    assert caught.value.__cause__ in (error, BROKEN)
    assert type(error).__name__ in str(caught.value)
    following.close()
