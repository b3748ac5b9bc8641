"""Cuts of a line of units, and for devices that hold several stages, against every division there is."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import CutError
from penstock.plan.search.partition import (
    balanced,
    balanced_devices,
    best_path,
    check_stages,
    evenly,
    fill,
    interleave,
    stage_costs,
    stage_sums,
)

# whole numbers, so that sums in any order are exact; zeros and ties come often
WORK = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=9)


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[float], list[int], int]:
    work = draw(WORK)
    crossing = draw(st.lists(st.integers(0, 5), min_size=len(work) + 1, max_size=len(work) + 1))
    return work, crossing, draw(st.integers(1, len(work)))


def divisions(num_units: int, num_stages: int) -> list[list[int]]:
    return [list(chosen) for chosen in combinations(range(1, num_units), num_stages - 1)]


def largest(work: list[float], boundaries: list[int]) -> float:
    return max(stage_sums(work, boundaries))


def test_balanced_puts_the_heavy_unit_alone() -> None:
    assert balanced([1, 1, 1, 3], [0, 1, 1, 1, 0], 2) == [3]


def test_balanced_lets_fewer_bytes_cross_among_equals() -> None:
    assert balanced([2, 0, 0, 2], [0, 7, 3, 5, 0], 2) == [2]


def test_slack_buys_a_cheaper_cut() -> None:
    work, crossing = [1.0, 1.0, 1.0, 1.0], [0, 9, 9, 1, 0]
    assert balanced(work, crossing, 2, slack=0.49) == [2]
    assert balanced(work, crossing, 2, slack=0.5) == [3]


def test_twelve_blocks_on_four_and_five_stages() -> None:
    starts = list(range(0, 24, 2))
    assert evenly(starts, 4) == [6, 12, 18]
    assert evenly(starts, 5) == [6, 12, 16, 20]
    assert evenly(starts, 1) == []


def test_more_stages_than_blocks() -> None:
    with pytest.raises(CutError, match=r"^3 stages .*got 2"):
        evenly([0, 4], 3)


@pytest.mark.parametrize(
    ("num_units", "num_stages", "message"),
    [
        (3, 0, "the number of stages must be at least 1; got 0"),
        (3, 4, "4 stages need at least 3 cuts, but this model allows 2; use at most 3 stages"),
    ],
)
def test_impossible_numbers_of_stages_are_refused(num_units: int, num_stages: int, message: str) -> None:
    with pytest.raises(CutError) as caught:
        check_stages(num_units, num_stages)
    assert str(caught.value) == message


def test_fill_as_pippy_does() -> None:
    assert fill([3, 1, 1, 3], 2) == [2]
    assert fill([1] * 12, 4) == [3, 6, 9]
    assert fill([5, 1, 1, 1], 2) == [1]  # the first item alone is more than the average
    assert fill([1, 1, 1, 9], 4) == [3]  # too coarse for four
    assert fill([0, 0, 4, 4], 2) == [3]


def test_sums_per_stage() -> None:
    assert stage_sums([1, 2, 3, 4], [1]) == [1, 9]
    assert stage_sums([1, 2, 3, 4], []) == [10]


@given(lines())
def test_the_largest_stage_is_as_small_as_it_can_be(line: tuple[list[float], list[int], int]) -> None:
    work, crossing, num_stages = line
    best = min(largest(work, d) for d in divisions(len(work), num_stages))
    chosen = balanced(work, crossing, num_stages)
    assert chosen in divisions(len(work), num_stages)
    assert largest(work, chosen) == best


@given(lines(), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_the_fewest_bytes_within_the_slack(line: tuple[list[float], list[int], int], slack: float) -> None:
    work, crossing, num_stages = line
    every = divisions(len(work), num_stages)
    limit = min(largest(work, d) for d in every) * (1 + slack)
    fewest = min(sum(crossing[b] for b in d) for d in every if largest(work, d) <= limit)
    chosen = balanced(work, crossing, num_stages, slack=slack)
    assert chosen in every
    assert largest(work, chosen) <= limit
    assert sum(crossing[b] for b in chosen) == fewest


@given(st.lists(st.floats(0, 1e-3), min_size=2, max_size=40), st.data())
def test_floats_of_any_size_give_stages_within_rounding(work: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(work)))
    chosen = balanced(work, [1] * (len(work) + 1), num_stages)
    assert len(chosen) == num_stages - 1
    assert chosen == sorted(set(chosen))
    best, _ = best_path([stage_costs(work, [0] * (len(work) + 1), 0.0)] * num_stages, np.maximum)
    assert largest(work, chosen) <= best * (1 + 1e-9) + 1e-15


@given(st.integers(1, 30), st.data())
def test_even_stages_differ_by_one_block_at_most(num_blocks: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_blocks))
    counts = stage_sums([1] * num_blocks, evenly(range(num_blocks), num_stages))
    assert sum(counts) == num_blocks
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(WORK, st.integers(1, 6))
def test_filled_stages_stop_at_the_average(sizes: list[float], num_stages: int) -> None:
    boundaries = fill(sizes, num_stages)
    assert len(boundaries) < num_stages
    assert boundaries == sorted(set(boundaries))
    average = sum(sizes) / num_stages
    bounds = [0, *boundaries]
    for start, stop in zip(bounds, boundaries, strict=False):
        filled = sum(sizes[start:stop])
        heads = [size for size in sizes[start:stop] if size]
        assert filled <= average * (1 + 1e-9) or len(heads) == 1
        assert filled + sizes[stop] > average


def test_bytes_that_cost_work_move_the_cut() -> None:
    work, crossing = [4.0, 1.0, 1.0, 4.0], [0, 1, 9, 1, 0]
    assert balanced(work, crossing, 2) == [2]
    assert balanced(work, crossing, 2, work_per_byte=0.5) == [1]


@given(lines(), st.integers(0, 3))
def test_the_costliest_stage_is_as_cheap_as_it_can_be(
    line: tuple[list[float], list[int], int], work_per_byte: int
) -> None:
    work, crossing, num_stages = line

    def costliest(boundaries: list[int]) -> float:
        bounds = [0, *boundaries, len(work)]
        ends = [crossing[a] + crossing[b] for a, b in pairwise(bounds)]
        return max(s + e * work_per_byte for s, e in zip(stage_sums(work, boundaries), ends, strict=True))

    chosen = balanced(work, crossing, num_stages, work_per_byte=work_per_byte)
    assert costliest(chosen) == min(costliest(d) for d in divisions(len(work), num_stages))


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int]]:
    """Up to nine units, and stages on devices of other speeds, some of which are impossible."""
    units = draw(st.lists(st.integers(0, 6).map(float), min_size=2, max_size=9))
    num_stages = draw(st.integers(2, len(units)))
    num_devices = draw(st.integers(1, num_stages))
    round_robin = [stage % num_devices for stage in range(num_stages)]
    places = draw(st.one_of(st.just(round_robin), st.permutations(round_robin)))
    slowness = draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=num_devices, max_size=num_devices))
    crossing = draw(st.lists(st.integers(0, 4), min_size=len(units) + 1, max_size=len(units) + 1))
    plain = stage_costs(units, crossing, 0.5)
    costs = [plain * slowness[place] for place in places]
    for _ in range(draw(st.integers(0, 3))):
        stage, start, end = (draw(st.integers(0, high)) for high in (num_stages - 1, len(units), len(units)))
        costs[stage][start, end] = np.inf
    return costs, places


def every(costs: list[np.ndarray], places: list[int]) -> list[tuple[float, float]]:
    """The busiest device and the largest stage of every division."""
    last = len(costs[0]) - 1
    found = []
    for cuts in combinations(range(1, last), len(costs) - 1):
        stages = [cost[a, b] for cost, (a, b) in zip(costs, pairwise((0, *cuts, last)), strict=True)]
        loads = [sum(s for s, p in zip(stages, places, strict=True) if p == device) for device in set(places)]
        found.append((max(loads), max(stages)))
    return [pair for pair in found if pair[0] < np.inf]


@given(instances(), st.sampled_from([0.0, 0.25]))
def test_the_busiest_device_is_as_little_busy_as_it_can_be(
    given: tuple[list[np.ndarray], list[int]], slack: float
) -> None:
    costs, places = given
    ways = every(costs, places)
    found = interleave(costs, places, slack=slack)
    if not ways:
        assert found is None
        return
    assert found is not None
    least = min(busiest for busiest, _ in ways)
    assert found.busiest <= least * (1 + slack)
    assert found.largest == min(largest for busiest, largest in ways if busiest <= least * (1 + slack))
    assert (found.busiest, found.largest) in ways


def test_devices_are_balanced_where_stages_cannot_be() -> None:
    # the heavy unit makes its stage large whatever the cuts; its device gets less of the rest
    work = [2.0, 2.0, 2.0, 2.0, 2.0, 6.0, 1.0, 1.0]
    cuts = balanced_devices(work, [0] * 9, 4, places=[0, 1, 0, 1])
    stages = [sum(work[a:b]) for a, b in pairwise((0, *cuts, 8))]
    assert (stages[0] + stages[2], stages[1] + stages[3]) == (9.0, 9.0)


def test_a_long_line_is_divided_evenly() -> None:
    work = [1.0 + (index % 7) / 10 for index in range(240)]
    cuts = balanced_devices(work, [0] * 241, 8, places=[0, 1, 2, 3] * 2)
    stages = [sum(work[a:b]) for a, b in pairwise((0, *cuts, 240))]
    loads = [stages[device] + stages[device + 4] for device in range(4)]
    assert max(loads) <= 1.005 * sum(work) / 4
    assert max(stages) <= 1.1 * sum(work) / 8


@given(
    st.lists(st.integers(1, 9).map(float), min_size=8, max_size=60),
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.data(),
)
def test_devices_whose_stages_are_neighbours_get_equal_parts(
    work: list[float], counts: list[int], data: st.DataObject
) -> None:
    assume(sum(counts) > len(counts))
    crossing = data.draw(st.lists(st.integers(0, 4), min_size=len(work) + 1, max_size=len(work) + 1))
    places = [device for device, count in enumerate(counts) for _ in range(count)]
    assume(sum(counts) <= len(work))
    cuts = balanced_devices(work, crossing, sum(counts), places=places, work_per_byte=0.1)
    assert len(cuts) == sum(counts) - 1
    assert cuts == sorted(set(cuts))
    edges = [0, *(cut for cut, (one, other) in zip(cuts, pairwise(places), strict=True) if one != other), len(work)]
    least = balanced(work, crossing, len(counts), work_per_byte=0.1)

    def busiest(ends: list[int]) -> float:
        return max(sum(work[a:b]) + 0.1 * (crossing[a] + crossing[b]) for a, b in pairwise(ends))

    best = [0, *least, len(work)]
    if all(b - a >= count for count, (a, b) in zip(counts, pairwise(best), strict=True)):
        assert busiest(edges) <= busiest(best) * (1 + 1e-9)


def test_more_stages_than_units() -> None:
    with pytest.raises(CutError, match="4 stages need at least 3 cuts"):
        balanced_devices([1.0, 1.0], [0, 0, 0], 4, places=[0, 1, 0, 1])
