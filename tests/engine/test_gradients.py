"""Sums over ranks: the same bits everywhere, in any number of ranks, while others are not ready yet."""

import threading
from typing import Any

import pytest
import torch

from penstock.engine.gradients import Synchronizer, Weight, make_buckets
from penstock.errors import ConnectionBroken, RunError
from penstock.group.world import World
from penstock.transport.base import Transport
from penstock.transport.collectives import all_gather, all_reduce
from penstock.transport.faulty import FaultyTransport
from penstock.transport.memory_network import MemoryNetwork
from tests.trainers import in_threads


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 64])
@pytest.mark.parametrize("at_once", [False, True])
def test_all_reduce(size: int, length: int, at_once: bool) -> None:
    def script(world: World) -> torch.Tensor:
        flat = torch.randn(length, generator=torch.Generator().manual_seed(world.rank))
        all_reduce(world.transport, flat, range(size), 77, at_once=at_once)
        return flat

    results = in_threads(size, script)
    parts = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    torch.testing.assert_close(results[0], torch.stack(parts).sum(0))
    assert all(torch.equal(result, results[0]) for result in results)


def test_all_gather_exchanges_documents() -> None:
    told = in_threads(3, lambda world: all_gather(world.transport, {"rank": world.rank, "odd": float("inf")}))
    assert told == [[{"rank": rank, "odd": float("inf")} for rank in range(3)]] * 3


def weight(name: str, ranks: tuple[int, ...] = (0, 1), holders: tuple[int, ...] = (0,), size: int = 4) -> Weight:
    return Weight(name, (0,), (torch.zeros(size, requires_grad=True),), ranks, holders)


def test_buckets_are_alike_on_all_their_ranks() -> None:
    order = ["a", "b", "c", "d", "e"]
    both = [weight("a"), weight("b", (0, 1, 2), (0, 3)), weight("c"), weight("d"), weight("e", (0,))]
    made = make_buckets(both, order, limit_bytes=32)
    assert [(bucket.number, [w.name for w in bucket.weights]) for bucket in made] == [
        (1, ["d", "c"]),
        (3, ["b"]),
        (4, ["a"]),
    ]
    other = make_buckets([weight("b", (0, 1, 2), (0, 3))], order, limit_bytes=32)
    assert [(bucket.number, [w.name for w in bucket.weights]) for bucket in other] == [(3, ["b"])]


def test_leaves_are_summed_as_they_become_final() -> None:
    def script(world: World) -> dict[str, torch.Tensor]:
        weights = [weight("a"), weight("b"), weight("alone", (world.rank,))]
        synchronizer = Synchronizer(world.transport, weights, ["a", "b", "alone"])
        for step in range(2):
            synchronizer.begin()
            for w in weights:
                w.leaves[0].grad = torch.full((4,), float(world.rank + step))
            if world.rank:
                synchronizer.leaf_done(0, "b")
            synchronizer.stage_done(0)
            synchronizer.flush()
            sums = synchronizer.finish()
        synchronizer.close()
        return sums

    first, second = in_threads(2, script)
    assert first["a"].tolist() == first["b"].tolist() == second["a"].tolist() == [3.0] * 4
    assert (first["alone"][0], second["alone"][0]) == (1.0, 2.0)


def _one_bucket(kind: type[Synchronizer] = Synchronizer, transport: Transport | None = None) -> Synchronizer:
    synchronizer = kind(transport or MemoryNetwork(2).transports[0], [weight("a")], ["a"])
    synchronizer.begin()
    return synchronizer


class _Unusual(BaseException):
    """Neither a broken connection nor a RuntimeError."""


@pytest.mark.timeout(20)
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyError("odd"), _Unusual()])
def test_error_of_a_thread_ends_the_wait(error: BaseException) -> None:
    class Failing(FaultyTransport):
        def receive(self, *_: object) -> Any:
            raise error

    synchronizer = _one_bucket(transport=Failing(MemoryNetwork(2).transports[0], []))
    synchronizer.flush()
    with pytest.raises(type(error)):
        synchronizer.finish()
    synchronizer.close()


class _Idle(Synchronizer):
    """A synchronizer whose threads end at once."""

    def _work(self) -> None: ...


@pytest.mark.timeout(20)
def test_finish_fails_without_threads() -> None:
    synchronizer = _one_bucket(_Idle)
    synchronizer.flush()
    with pytest.raises(RunError, match="no thread is left"):
        synchronizer.finish()
    synchronizer.close()


@pytest.mark.timeout(20)
def test_a_wait_for_a_sum_that_nobody_sends_ends_with_the_connection() -> None:
    transport = MemoryNetwork(2).transports[0]
    synchronizer = Synchronizer(transport, [weight("a")], ["a"])
    synchronizer.begin()
    synchronizer.flush()
    threading.Timer(0.3, transport.abort).start()  # as a verdict does
    with pytest.raises(ConnectionBroken):
        synchronizer.finish()
    synchronizer.close()
