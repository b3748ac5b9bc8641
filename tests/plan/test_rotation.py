"""Portions of cuts against a dense grid and another solver; sets of cuts against their portions."""

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.search.rotation import BoundaryCosts, Portions, best_portions, couple, minimize, rotate
from tests.fewer import examples


def make_costs(
    seconds: Sequence[float], crossing: Sequence[float], num_stages: int, links: bool = False
) -> BoundaryCosts:
    """Equal devices on which every crossing byte costs a second on both sides."""
    work = np.concatenate([[0.0], np.cumsum(seconds)])
    sent = np.array(crossing, dtype=np.float64)
    return BoundaryCosts(
        starts=[sent - work] * num_stages,
        ends=[sent + work] * num_stages,
        crossing=[3 * sent] * (num_stages - 1) if links else (),
    )


def expected(costs: BoundaryCosts, sets: Sequence[tuple[tuple[int, ...], float]]) -> list[float]:
    last = len(costs.starts[0]) - 1
    loads = np.zeros(len(costs.starts))
    for cuts, weight in sets:
        bounds = (0, *cuts, last)
        loads += weight * np.array([costs.load(s, a, b) for s, (a, b) in enumerate(pairwise(bounds))])
    return loads.tolist()


@st.composite
def instances(draw: st.DrawFn) -> tuple[BoundaryCosts, list[int]]:
    num_units = draw(st.integers(3, 12))
    seconds = draw(st.lists(st.integers(1, 9), min_size=num_units, max_size=num_units))
    crossing = draw(st.lists(st.integers(0, 3), min_size=num_units + 1, max_size=num_units + 1))
    num_stages = draw(st.integers(2, min(4, num_units)))
    cuts = sorted(draw(st.sets(st.integers(1, num_units - 1), min_size=num_stages - 1, max_size=num_stages - 1)))
    return make_costs(seconds, crossing, num_stages, links=draw(st.booleans())), cuts


def test_three_units_alternate_on_two_devices() -> None:
    sets = rotate(make_costs([1, 1, 1], [0] * 4, 2), [1])
    assert sets == [((1,), 0.5), ((2,), 0.5)]


def test_costly_bytes_keep_a_cut_out_of_the_rotation() -> None:
    # to lie at boundary 2 sends 2 seconds' worth more: not worth it
    assert rotate(make_costs([1, 1, 1], [0, 0, 2, 0], 2), [1]) == [((1,), 1.0)]


def test_twelve_blocks_on_five_devices() -> None:
    sets = rotate(make_costs([1.0] * 12, [0.0] * 13, 5), [2, 5, 7, 10])
    assert max(expected(make_costs([1.0] * 12, [0.0] * 13, 5), sets)) == pytest.approx(2.4, rel=1e-3)
    assert len(sets) <= 5


def test_a_device_that_cannot_hold_more_keeps_its_units() -> None:
    costs = make_costs([1, 1, 1], [0] * 4, 2)
    assert rotate(costs, [1], holds=lambda stage, _, end: stage != 0 or end <= 1) == [((1,), 1.0)]


def test_sets_move_together() -> None:
    portions = Portions((((3, 0.5), (4, 0.5)), ((7, 0.25), (9, 0.75))), 0.0)
    assert couple(portions) == [((3, 7), 0.25), ((3, 9), 0.25), ((4, 9), 0.5)]


@given(instances())
def test_sets_have_the_portions_and_keep_the_order(instance: tuple[BoundaryCosts, list[int]]) -> None:
    costs, cuts = instance
    last = len(costs.starts[0]) - 1
    sets = rotate(costs, cuts, period=1000)
    assert sum(weight for _, weight in sets) == pytest.approx(1.0)
    for chosen, _ in sets:
        assert all(a < b for a, b in pairwise((0, *chosen, last)))
    single = max(expected(costs, [(tuple(cuts), 1.0)]))
    links = [max((c[cut] for c, cut in zip(costs.crossing, cuts, strict=False)), default=0.0)]
    assert max(expected(costs, sets)) <= max(single, *links) * (1 + 1e-2)


@settings(max_examples=examples(60))
@given(instances())
def test_portions_are_the_optimum_of_another_solver(instance: tuple[BoundaryCosts, list[int]]) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    costs, cuts = instance
    last = len(costs.starts[0]) - 1
    bounds = [0, *cuts, last]
    windows = [range(cut - (cut - a) // 2 if k else 1, cut + 1) for k, (a, cut) in enumerate(pairwise(bounds[:-1]))]
    found = best_portions(costs, cuts, windows)
    places = [(k, b) for k, window in enumerate(windows) for b in window]
    rows, limits = [], []
    for stage in range(len(cuts) + 1):
        rows.append(
            [costs.ends[stage][b] * (k == stage) + costs.starts[stage][b] * (k == stage - 1) for k, b in places]
        )
        limits.append(-(costs.starts[0][0] * (stage == 0) + costs.ends[stage][last] * (stage == len(cuts))))
    for cut, seconds in enumerate(costs.crossing):
        rows.append([seconds[b] * (k == cut) for k, b in places])
        limits.append(0.0)
    matrix = np.column_stack([np.array(rows), -np.ones(len(rows))])
    equal = np.array([[float(k == cut) for k, _ in places] + [0.0] for cut in range(len(cuts))])
    pace_only = np.zeros(len(places) + 1)
    pace_only[-1] = 1.0
    best = optimize.linprog(pace_only, A_ub=matrix, b_ub=limits, A_eq=equal, b_eq=np.ones(len(cuts)))
    assert best.fun <= found.bottleneck_s * (1 + 1e-9) + 1e-9
    assert found.bottleneck_s <= best.fun * (1 + 3e-4) + 1e-9


@settings(max_examples=examples(30))
@given(instances())
def test_no_point_of_a_dense_grid_is_better(instance: tuple[BoundaryCosts, list[int]]) -> None:
    costs, cuts = instance
    cuts = cuts[:2]
    costs = BoundaryCosts(starts=costs.starts[: len(cuts) + 1], ends=costs.ends[: len(cuts) + 1])
    last = len(costs.starts[0]) - 1
    windows = [[cut, cut + 1] for cut in cuts]
    if windows[-1][1] >= last or (len(cuts) > 1 and cuts[0] + 1 >= cuts[1]):
        return
    found = best_portions(costs, cuts, windows)
    grid = np.linspace(0, 1, 51)
    for moved in product(grid, repeat=len(cuts)):
        portions = Portions(
            tuple(((cut, 1 - part), (cut + 1, part)) for cut, part in zip(cuts, moved, strict=True)), 0.0
        )
        ends = [sum(w * costs.ends[k][b] for b, w in cut) for k, cut in enumerate(portions.per_cut)]
        starts = [sum(w * costs.starts[k + 1][b] for b, w in cut) for k, cut in enumerate(portions.per_cut)]
        loads = [a + b for a, b in zip([costs.starts[0][0], *starts], [*ends, costs.ends[-1][last]], strict=True)]
        assert max(loads) >= found.bottleneck_s * (1 - 3e-4)


def test_a_program_that_would_circle_ends() -> None:
    # Beale's example, which Dantzig's rule alone never leaves
    matrix = np.array(
        [[1, 0, 0, 0.25, -60, -1 / 25, 9], [0, 1, 0, 0.5, -90, -1 / 50, 3], [0, 0, 1, 0, 0, 1, 0]], dtype=np.float64
    )
    costs = np.array([0, 0, 0, -0.75, 150, -0.02, 6])
    solution, _ = minimize(costs, matrix, np.array([0.0, 0.0, 1.0]), [0, 1, 2])
    assert float(costs @ solution) == pytest.approx(-0.05)
