"""Cuts for devices that hold several stages, against every division there is."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import CutError
from penstock.plan.search.interleaved_cuts import balanced_devices, interleave
from penstock.plan.search.partition import balanced, stage_costs


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
