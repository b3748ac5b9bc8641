"""The search for many devices: near the best where that is known, never beyond the bound, within memory."""

import pytest

from penstock.plan.cost.problem import Problem, bottleneck_bound_s, bottleneck_s, fits_all
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.search.exact import best_divisions
from penstock.plan.search.large import good_division, refine
from tests.plan.instances import every_division, random_problem
from tests.spec.samples import make_cluster, make_profile


def test_lower_bound_is_below_every_plan() -> None:
    for seed in range(120):
        problem = random_problem(seed, max_units=7, max_devices=3, trains=seed % 2 == 1)
        paces = [bottleneck_s(problem, division) for division in every_division(problem)]
        assert all(pace >= bottleneck_bound_s(problem) * (1 - 1e-9) for pace in paces)


def test_search_finds_a_plan_near_the_best() -> None:
    ratios = []
    possible = 0
    for seed in range(150):
        problem = random_problem(seed, trains=seed % 3 == 0)
        found = good_division(problem)
        exact = best_divisions(problem)
        assert exact is not None
        possible += bool(exact)
        if found is None:
            continue
        assert fits_all(problem, found)
        assert [stage.start for stage in found] == [0, *(stage.end for stage in found[:-1])]
        assert found[-1].end == problem.num_units
        best = min(value for value, _ in exact.values())
        assert bottleneck_s(problem, found) >= best * (1 - 1e-9)
        ratios.append(bottleneck_s(problem, found) / best)
    assert len(ratios) >= 0.95 * possible
    assert sorted(ratios)[len(ratios) // 2] < 1.05


def test_forty_unequal_devices_are_used_well() -> None:
    seconds = [0.5 + (index * 7919 % 100) / 100 for index in range(600)]
    problem = Problem(make_profile(seconds), make_cluster(*[0.3 + (k * 31 % 40) / 40 for k in range(40)]), Setting())
    found = good_division(problem)
    assert found is not None
    assert bottleneck_s(problem, found) <= bottleneck_bound_s(problem) * 1.03


def test_search_can_use_some_devices_only() -> None:
    problem = Problem(make_profile([1.0] * 40), make_cluster(1, 2, 3, 4, 5), Setting())
    found = good_division(problem, [1, 3])
    assert found is not None
    assert {stage.device for stage in found} == {1, 3}
    assert bottleneck_s(problem, found) == pytest.approx(40 / 6, rel=0.05)


def test_settling_a_plan_is_never_slower() -> None:
    for seed in range(80):
        problem = random_problem(seed, trains=seed % 2 == 0)
        for division in list(every_division(problem))[::37]:
            refined = refine(problem, division)
            assert [stage.device for stage in refined] == [stage.device for stage in division]
            assert fits_all(problem, refined)
            assert bottleneck_s(problem, refined) <= bottleneck_s(problem, division) * (1 + 1e-9)
