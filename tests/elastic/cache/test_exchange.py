"""Cached rows come to whom they belong to, in the batch's order, whoever keeps them."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.elastic.frozen_cache import CachedFeatures, owner_of, place_of
from penstock.elastic.shard import Shard, ShardFile
from penstock.engine.placement import Grid, Replica
from penstock.errors import ConnectionBroken, TransportError
from penstock.transport.faulty import Fault, FaultyTransport
from penstock.transport.memory_network import MemoryNetwork
from tests.elastic.cache.shards import layout_of, rows
from tests.fewer import examples
from tests.trainers import on_each_rank

SAMPLES = 14
Work = Callable[[CachedFeatures, int], Any]


def fill(folder: Path, size: int, num_rows: int, **changed: Any) -> list[Shard]:
    """Each owner's shard, with the rows of its samples."""
    shards = []
    for owner in range(size):
        own = [row for row in range(num_rows) if owner_of(row, size) == owner]
        layout = layout_of(len(own), owner=owner, **changed)
        with ShardFile(folder, layout, None) as file:
            for row in own:
                file.append(rows(row, 1))
            shards.append(file.shard())
    return shards


def exchange_rows(
    folder: Path, grid: Grid, size: int, work: Work, *, hosts: Sequence[str] = (), num_views: int = 1,
    network: MemoryNetwork | None = None, faults: Sequence[Fault] = (), **changed: Any,
) -> list[Any]:  # fmt: skip
    """Have every rank do its work on the rows of 14 samples."""
    transports = [FaultyTransport(transport, faults) for transport in (network or MemoryNetwork(size)).transports]
    shards = fill(folder, size, SAMPLES * num_views, **changed)

    def one(rank: int) -> Any:
        alike = {r: shards[r] for r in range(size) if r == rank or (hosts and hosts[r] == hosts[rank])}
        features = CachedFeatures(transports[rank], grid, alike, skipped=1, hosts=hosts, num_views=num_views)
        try:
            return work(features, rank)
        finally:
            features.close()

    try:
        return on_each_rank(size, one)
    finally:
        for shard in shards:
            shard.close()


def expected(samples: Sequence[int]) -> list[Tensor]:
    parts = [rows(sample, 1) for sample in samples]
    return [torch.cat([part[column] for part in parts]) for column in range(2)] if parts else []


def mine(grid: Grid, rank: int, batch: Sequence[int]) -> list[int]:
    """The samples of a batch that a rank needs: it holds the first stage that runs of a replica."""
    holders = grid.holders(1)
    if rank not in holders:
        return []
    part = grid.rows(len(batch))[holders.index(rank)]
    return list(batch[part.start : part.stop])


def check(found: Any, samples: Sequence[int]) -> None:
    if isinstance(found, BaseException):
        raise found
    for column, wanted in zip(found, expected(samples), strict=False):
        assert column.dtype == wanted.dtype
        assert torch.equal(column, wanted)
    assert len(found) == (2 if len(samples) else len(found))


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, int]:
    """Up to four processes in replicas of one or two devices, the last ones idle."""
    size = draw(st.integers(1, 4))
    free, replicas = list(range(size)), list[Replica]()
    while free and (not replicas or draw(st.booleans())):
        devices = tuple(free.pop(0) for _ in range(min(len(free), draw(st.integers(1, 2)))))
        stages = (devices[0], devices[0], devices[-1])
        replicas.append(Replica(devices, stages, draw(st.integers(1, 3))))
    first = replicas[0]
    replicas[0] = Replica((*first.devices, *free), first.stages, first.num_microbatches)
    return Grid(tuple(replicas)), size


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=grids(),
    order=st.permutations(range(SAMPLES)),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    machines=st.one_of(st.just([]), st.lists(st.sampled_from("ab"), min_size=4, max_size=4)),
    prefetched=st.booleans(),
)
def test_every_replica_gets_its_rows(
    made: tuple[Grid, int], order: list[int], sizes: list[int], machines: list[str], prefetched: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Batches of any size, as the last one of an epoch may be small."""
    grid, size = made
    batches, at = [], 0
    for count in sizes:
        batches.append(order[at : at + count] or order[:1])
        at += count

    def work(features: CachedFeatures, _rank: int) -> list[list[Tensor]]:
        following = [*batches[1:], None] if prefetched else [None] * len(batches)
        return [features.outputs(batch, after) for batch, after in zip(batches, following, strict=True)]

    found = exchange_rows(tmp_path_factory.mktemp("cache"), grid, size, work, hosts=machines[:size])
    for rank, outputs in enumerate(found):
        assert not isinstance(outputs, BaseException), outputs
        for batch, output in zip(batches, outputs, strict=True):
            check(output, mine(grid, rank, batch))


ONE_OF_THREE = Grid((Replica((0, 1, 2), (0, 0), 2),))
PAIR = Grid((Replica((0,), (0, 0), 1), Replica((1,), (1, 1), 1)))


def test_another_batch_than_the_one_that_was_fetched(tmp_path: Path) -> None:
    """As after a batch whose inputs the loop has changed."""

    def work(features: CachedFeatures, _rank: int) -> Any:
        features.outputs([1, 2, 3], [4, 5, 6])
        return features.outputs([7, 8, 9], None)

    found = exchange_rows(tmp_path, ONE_OF_THREE, 3, work)
    check(found[0], [7, 8, 9])


def test_a_view_of_each_sample(tmp_path: Path) -> None:
    def work(features: CachedFeatures, _rank: int) -> Any:
        features.view = 2
        return features.outputs([3, 0, 12], None)

    found = exchange_rows(tmp_path, ONE_OF_THREE, 3, work, num_views=3)
    check(found[0], [3 * 3 + 2, 2, 12 * 3 + 2])


def test_rows_that_are_stored_smaller_arrive_as_they_were(tmp_path: Path) -> None:
    found = exchange_rows(
        tmp_path, ONE_OF_THREE, 3, lambda features, _: features.outputs([2, 1, 7], None), stored=torch.bfloat16
    )
    floats, numbers = expected([2, 1, 7])
    assert found[0][0].dtype == torch.float32
    assert torch.equal(found[0][0], floats.bfloat16().float())
    assert torch.equal(found[0][1], numbers)


@pytest.mark.parametrize(("hosts", "sends"), [(["a", "a"], False), (["a", "b"], True), ([], True)])
def test_processes_of_one_machine_send_nothing(tmp_path: Path, hosts: list[str], sends: bool) -> None:
    """A rank that sends loses its connections."""
    found = exchange_rows(
        tmp_path, PAIR, 2, lambda features, _: features.outputs([1, 2, 3, 4], None), hosts=hosts,
        faults=[Fault(kind="close", rank=rank, message=0) for rank in range(2)],
    )  # fmt: skip
    if sends:
        assert all(isinstance(each, ConnectionBroken) for each in found)
    else:
        check(found[0], [1, 2])
        check(found[1], [3, 4])


def test_rows_that_are_damaged_on_the_way(tmp_path: Path) -> None:
    damage = [Fault(kind="corrupt", rank=1, message=0)]
    found = exchange_rows(tmp_path, ONE_OF_THREE, 3, lambda features, _: features.outputs([4, 3], None), faults=damage)
    assert isinstance(found[0], TransportError)
    assert "cached rows from rank 1 are damaged" in str(found[0])
    assert not isinstance(found[1], BaseException)


def test_a_batch_that_is_fetched_ahead_fails_when_it_is_asked_for(tmp_path: Path) -> None:
    def work(features: CachedFeatures, rank: int) -> Any:
        first = features.outputs([4, 3], [1, 6])
        if rank == 0:
            check(first, [4, 3])
        return features.outputs([1, 6], None)

    found = exchange_rows(tmp_path, ONE_OF_THREE, 3, work, faults=[Fault(kind="corrupt", rank=1, message=1)])
    assert isinstance(found[0], TransportError)


def test_closing_waits_for_what_is_on_its_way_and_ends_the_thread(tmp_path: Path) -> None:
    def work(features: CachedFeatures, _rank: int) -> None:
        features.outputs([1, 2, 3], [4, 5, 6])

    assert exchange_rows(tmp_path, ONE_OF_THREE, 3, work) == [None] * 3
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-features")]


def test_closing_after_a_process_has_gone(tmp_path: Path) -> None:
    """What was fetched ahead does not come any more."""
    network = MemoryNetwork(2)
    done = threading.Barrier(2)

    def work(features: CachedFeatures, rank: int) -> Any:
        first = features.outputs([1, 2, 3, 4], [5, 6, 7, 8] if rank == 0 else None)
        done.wait(10.0)
        if rank == 1:
            network.transports[1].abort()
        else:
            with pytest.raises(ConnectionBroken):
                features.outputs([5, 6, 7, 8], None)
        return first

    found = exchange_rows(tmp_path, PAIR, 2, work, network=network)
    check(found[0], [1, 2])


def test_samples_are_dealt_to_owners_in_turn() -> None:
    assert [owner_of(sample, 3) for sample in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [place_of(sample, 3) for sample in range(7)] == [0, 0, 0, 1, 1, 1, 2]
