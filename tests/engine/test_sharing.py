"""Stages that several devices share: every microbatch once and in order, whoever takes it."""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.sharing import sources_of
from penstock.errors import PenstockError, UsageError
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.transport.faulty import Fault
from tests.worlds import Divided, MemoryWorld, divided_tower, memory_world, tower_inputs


@pytest.fixture(scope="module")
def thirds() -> Divided:
    return divided_tower(3)


@pytest.fixture
def five() -> Iterator[MemoryWorld]:
    with memory_world(5) as world:
        yield world


def streamed(divided: Divided, deployment: object, count: int) -> list[Tensor]:
    """Stream so many microbatches, the last one smaller, and check each against the model."""
    inputs = [*tower_inputs(count), *tower_inputs(1, batch=1)]
    fed = [([x, rows], {"batch": len(x)}) for x, rows in inputs]
    results = [tensors[0] for tensors in deployment.stream(fed)]  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = [divided.model(*microbatch) for microbatch in inputs]
    assert len(results) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    return results


@st.composite
def placements(draw: st.DrawFn) -> list[RoundRobin[int]]:
    """Six workers dealt out to three stages, each with an order of turns in which all of its workers come."""
    counts = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 2, 2), (3, 2, 1), (1, 2, 3)]))
    places, first = [], 1
    for count in counts:
        more = draw(st.lists(st.integers(0, count - 1), max_size=4))
        order = draw(st.permutations([*range(count), *more]))
        places.append(RoundRobin(list(range(first, first + count)), order))
        first += count
    return places


@settings(max_examples=25, deadline=None)
@given(places=placements(), counts=st.lists(st.integers(0, 12), min_size=1, max_size=2))
def test_every_microbatch_once_and_in_order(thirds: Divided, places: list[RoundRobin[int]], counts: list[int]) -> None:
    with memory_world(6) as world:
        deployment = thirds.deploy(world.feeder, ranks=places)  # type: ignore[arg-type]
        for count in counts:
            streamed(thirds, deployment, count)
            done = dict.fromkeys(range(3), 0)
            for report in deployment.last_report.stages:
                done[report.stage] += report.num_microbatches
            assert done == dict.fromkeys(range(3), count + 1)
        deployment.close()


def test_each_device_reports_its_own_part(thirds: Divided, five: MemoryWorld) -> None:
    places = [RoundRobin([1]), RoundRobin([2, 3, 4], (0, 1, 0, 2)), RoundRobin([5])]
    deployment = thirds.deploy(five.feeder, ranks=places)  # type: ignore[arg-type]
    streamed(thirds, deployment, 7)
    reports = deployment.last_report.stages
    assert [(r.stage, r.device) for r in reports] == [
        (0, "worker 1"), (1, "worker 2"), (1, "worker 3"), (1, "worker 4"), (2, "worker 5"),
    ]  # fmt: skip
    assert [r.num_microbatches for r in reports] == [8, 4, 2, 2, 8]
    deployment.close()


def test_the_feeding_process_may_share_a_stage(thirds: Divided) -> None:
    with memory_world(4) as world:
        places = [RoundRobin([1]), RoundRobin([0, 2], (0, 1, 1)), RoundRobin([3, 4], (1, 0))]
        deployment = thirds.deploy(world.feeder, ranks=places)  # type: ignore[arg-type]
        for count in (0, 3, 10):
            streamed(thirds, deployment, count)
        deployment.close()


def test_a_device_that_shares_a_stage_holds_no_other(thirds: Divided, five: MemoryWorld) -> None:
    places = [RoundRobin([1, 2], (0, 1)), RoundRobin([3]), RoundRobin([2])]
    with pytest.raises(UsageError, match=r"rank 2 .* 0, 2;"):
        thirds.deploy(five.feeder, ranks=places)  # type: ignore[arg-type]


def test_leaving_early_cancels_and_the_next_stream_is_whole(thirds: Divided, five: MemoryWorld) -> None:
    places = [RoundRobin([1, 2], (0, 1)), RoundRobin([3]), RoundRobin([4, 5], (1, 0, 0))]
    deployment = thirds.deploy(five.feeder, ranks=places)  # type: ignore[arg-type]
    stream = deployment.stream(([x, rows], {"batch": len(x)}) for x, rows in tower_inputs(50))
    next(stream)
    stream.close()
    streamed(thirds, deployment, 5)
    deployment.close()


@pytest.mark.parametrize("kind", ["drop", "duplicate", "corrupt", "close"])
def test_mishaps_on_a_shared_stage_are_named(
    thirds: Divided, kind: Literal["drop", "duplicate", "corrupt", "close"]
) -> None:
    fault = Fault(kind=kind, rank=3, message=4)
    places = [RoundRobin([1]), RoundRobin([2, 3], (0, 1)), RoundRobin([4])]
    with memory_world(4, [fault]) as world:
        deployment = thirds.deploy(world.feeder, ranks=places, stall_s=0.5)  # type: ignore[arg-type]
        with pytest.raises(
            PenstockError, match=r"stage 2 .*worker 4|stage 2 expected|(worker|rank) 3|message \d+ is damaged"
        ):
            streamed(thirds, deployment, 20)
        deployment.abandon()


def test_where_microbatches_come_from() -> None:
    one, two, three = RoundRobin([1]), RoundRobin([2, 3], (0, 1)), RoundRobin([4, 5, 6], (0, 1, 2, 1))
    assert sources_of(one, two, 3) == [0]
    assert sources_of(two, one, 1) == [0, 1]
    assert sources_of(two, three, 5) == [1, 1]
    assert sources_of(three, two, 2) == [0, 2]
