"""Exchanges of processes of which some are lost: complete for all who are left, or for none."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken, DeviceLost, PenstockError
from penstock.group.board import Verdict
from penstock.group.links import PlainLinks
from penstock.group.liveness import Boards, Health
from penstock.group.roll_call import Membership, Rendezvous
from penstock.group.world import World
from penstock.train import exchanges as module
from penstock.train.exchanges import Exchanges
from penstock.transport.base import MeteredTransport
from penstock.transport.collectives import all_gather
from penstock.transport.memory_network import MemoryNetwork
from tests.trainers import on_each_rank

RENDEZVOUS = Rendezvous(PlainLinks(), HashStore, "nowhere", 1, "nowhere", "a thread")


class Groups:
    """Groups of threads that play processes; the next one has formed as soon as anybody asks for it."""

    def __init__(self, *members: str) -> None:
        self._forming = threading.Lock()
        self._groups: dict[tuple[str, ...], dict[str, World]] = {}
        self._healths: list[Health] = []
        self.follows: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.first = self.group(members)

    def group(self, members: tuple[str, ...]) -> dict[str, World]:
        with self._forming:
            if members not in self._groups:
                network, store = MemoryNetwork(len(members)), HashStore()
                self._groups[members] = {
                    name: World(
                        transport=MeteredTransport(network.transports[rank]), names=list(members),
                        devices=list(range(len(members))),
                        store=store, bandwidths=[None] * len(members), reason_s=1.0,
                        health=Health(
                            Boards.of_threads(store, rank, len(members)), rank, list(members),
                            network.transports[rank].abort, beat_s=0.02,
                        ),
                        membership=Membership(rendezvous=RENDEZVOUS, run="run", own=name, members=members),
                    )
                    for rank, name in enumerate(members)
                }  # fmt: skip
                self._healths += [world.health for world in self._groups[members].values()]
            return self._groups[members]

    def close(self) -> None:
        for health in self._healths:  # worlds become others
            health.close()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Groups("a", "b", "c")

    class Formed:
        """In the place of what forms groups in the background."""

        def __init__(self, world: World) -> None:
            self._own = world.membership.own if world.membership is not None else ""

        def newest(self, error: PenstockError) -> World:
            known = next((g for g in made.follows if self._own in g and made.group(g)[self._own].health.failure), None)
            if known is None:
                raise error
            return replace(made.group(made.follows[known])[self._own])

        def close(self) -> None: ...

    monkeypatch.setattr(module, "Following", Formed)
    yield made
    made.close()


def exchanges_of(world: World) -> tuple[Exchanges, World]:
    own = replace(world, transport=MeteredTransport(world.transport.inner))
    return Exchanges(own), own


def lose(groups: Groups, name: str) -> None:
    world = groups.first[name]
    left = tuple(each for each in groups.first if each != name)
    groups.follows[tuple(groups.first)] = left
    groups.group(left)
    first = next(iter(groups.first.values()))
    first.health.announce(Verdict(rank=world.rank, message=f"{name} is gone; start again", lost=True))


@pytest.mark.parametrize("ahead", [0, 1])
def test_survivor_gets_the_result_of_another(groups: Groups, ahead: int) -> None:
    """The third has told one of the others before it was lost: then both have it, and nothing is done again."""
    names = list(groups.first)
    reached = threading.Barrier(2)

    def run(rank: int) -> Any:
        own, world = exchanges_of(groups.first[names[rank]])
        changed: list[Any] = []
        own.changed = changed.append

        def half() -> dict[str, Any]:
            """All others have what this one tells, and what they told it is lost."""
            all_gather(world.transport, {"from": rank})
            reached.wait(10.0)
            raise ConnectionBroken("the connection to rank 2 broke")

        if rank == 2:
            return own.once(lambda: {"from": 2})
        first = own.once((lambda: {"from": rank}) if rank == ahead else half)
        if rank == ahead:
            reached.wait(10.0)
            lose(groups, "c")
        second = own.once(lambda: {"then": world.rank}) or own.once(lambda: {"then": world.rank})
        return first, second, own.count, changed

    found = on_each_rank(3, run)
    for first, second, count, changed in found[:2]:
        assert first == [{"from": 0}, {"from": 1}, {"from": 2}]
        assert second == [{"then": 0}, {"then": 1}]
        assert count == 2
        assert changed == [{0: 0, 1: 1}]


def test_lost_result_is_computed_again(groups: Groups) -> None:
    names = list(groups.first)

    def run(rank: int) -> Any:
        own, world = exchanges_of(groups.first[names[rank]])
        tries: list[int] = []

        def work() -> dict[str, Any]:
            tries.append(world.rank)
            return {"from": world.rank}

        if rank == 1:  # tells nobody
            lose(groups, "b")
            return None
        found = own.once(work)
        while found is None:
            found = own.once(work)
        return found, tries, own.count, own.why

    first, _, third = on_each_rank(3, run)
    told = [{"from": 0}, {"from": 1}]
    assert first == (told, [0, 0], 1, "b is gone")
    assert third == (told, [2, 1], 1, "b is gone")


def test_loss_without_a_next_group_is_raised(groups: Groups) -> None:
    def run(rank: int) -> Any:
        own, _ = exchanges_of(groups.first["abc"[rank]])
        if rank == 2:
            groups.first["a"].health.announce(Verdict(rank=0, message="a is gone", lost=True))
            return None
        own.once(dict)
        return None

    found = on_each_rank(3, run)
    assert all(isinstance(error, DeviceLost) and "a is gone" in str(error) for error in found[:2])
