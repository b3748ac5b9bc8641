"""Rows are shared out anew where an epoch's arrangement changes: each sample once, in the order of the epoch."""

from functools import cache
from itertools import chain
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.placement import Grid, Replica
from penstock.graph.cuts import Cuts
from penstock.group.world import World
from penstock.train.captured import Captured
from penstock.train.loader import Loader
from penstock.train.migration import fix_microbatches, migrate
from tests.fewer import examples
from tests.learners import Numbers
from tests.models import seeded
from tests.trainers import Still, in_threads, make_trainer

SIZE = 3
GRIDS = [
    Grid((Replica((0, 1, 2), (0, 1, 2), 4),)),
    Grid((Replica((2, 0, 1), (2, 2, 2), 4),)),  # two are idle
    Grid((Replica((1, 2), (1, 2, 2), 3), Replica((0,), (0, 0, 0), 1))),
    Grid((Replica((0,), (0, 0, 0), 1), Replica((1,), (1, 1, 1), 1), Replica((2,), (2, 2, 2), 2))),
]


@cache
def captured() -> Captured:
    model = seeded(torch.nn.Sequential, *[torch.nn.Linear(4, 4) for _ in range(3)]).train()
    return Captured(model, (torch.zeros(2, 4),))


def load(num_rows: int, batch_size: int, changes: dict[int, int], workers: int = 0) -> list[Any]:
    """What each rank gets for two epochs, before some batches of which the arrangement changes, and reads for it."""

    def script(world: World) -> Any:
        trainer = make_trainer(captured(), world, stages=SIZE, microbatches=4)
        fix_microbatches(trainer)
        data, cuts, found = Numbers(num_rows), list(Cuts(captured().graph)), []
        loader = Loader(trainer, data, batch_size=batch_size, shuffle=True, num_workers=workers)
        loader.follower = Still()
        orders = []
        for _ in range(2):
            orders += loader._order.batches(loader.epoch)
            for x, numbers in loader:
                rows = numbers.tolist()
                assert x.shape == (len(numbers), 4)
                assert x[:, 0].tolist() == rows
                loaded = trainer.data.yielded[0]
                found.append(
                    (trainer.now.placed.grid, len(numbers), rows, loaded.samples, loaded.following, trainer.data.short)
                )
                change = changes.get(len(found))
                if change is not None:
                    migrate(trainer, trainer.now.placed.moved(GRIDS[change], [cuts[0], cuts[1]]))
        state = loader.state()
        trainer.close()
        return found, orders, state, len(data.read)

    return in_threads(SIZE, script)


def check(results: list[Any], batch_size: int) -> None:
    orders = results[0][1]
    assert all(result[1] == orders for result in results)
    assert all(len(result[0]) == len(orders) for result in results)
    for number, batch in enumerate(orders):
        seen = [result[0][number] for result in results]
        grid = seen[0][0]
        assert all(each[0] is grid or each[0] == grid for each in seen)
        for replica, part in zip(grid.replicas, grid.rows(len(batch)), strict=True):
            mine = batch[part.start : part.stop]
            for rank in replica.devices:
                _, count, rows, samples, following, short = seen[rank]
                assert count == len(mine)
                assert rows == mine
                assert samples == batch
                last = number + 1 in {len(orders) // 2, len(orders)}
                assert following == (None if last else orders[number + 1])
                assert short == (count if last or len(batch) < batch_size else None)


@settings(max_examples=examples(25))
@given(
    num_rows=st.integers(1, 14),
    batch_size=st.integers(1, 6),
    changes=st.dictionaries(st.integers(1, 12), st.integers(0, len(GRIDS) - 1), max_size=5),
)
def test_samples_keep_their_order_across_placements(num_rows: int, batch_size: int, changes: dict[int, int]) -> None:
    results = load(num_rows, batch_size, changes)
    check(results, batch_size)
    count = -(-num_rows // batch_size)
    assert len(results[0][1]) == 2 * count
    assert all(sorted(chain(*results[0][1][first : first + count])) == list(range(num_rows)) for first in (0, count))
    assert all(result[2] == {"epoch": 2, "position": 0} for result in results)


def test_placement_changes_before_a_short_batch_and_between_epochs() -> None:
    results = load(11, 4, {2: 2, 3: 3, 4: 1, 6: 0})
    check(results, 4)
    assert [len(batch) for batch in results[0][1]] == [4, 4, 3, 4, 4, 3]
    # by rank, the rows of every batch: replicas of 3 and 1 microbatches, of 1, 1 and 2, and of all 4
    assert [each[1] for each in results[0][0]] == [4, 4, 0, 1, 4, 3]
    assert [each[1] for each in results[1][0]] == [4, 4, 3, 1, 4, 3]
    assert [each[1] for each in results[2][0]] == [4, 4, 3, 2, 4, 3]


def test_a_replica_may_have_no_row_of_the_last_batch() -> None:
    """Of three rows and four microbatches the last microbatch has none, and so the replica of that one."""
    results = load(3, 4, {1: 2})
    check(results, 4)
    assert [each[1:3] for each in results[0][0]] == [(3, results[0][1][0]), (0, [])]
    assert [each[1] for each in results[2][0]] == [3, 3]


def test_the_same_arrangement_goes_on_loading_where_it_was() -> None:
    results = load(12, 4, {})
    assert [result[3] for result in results] == [24, 0, 0]
