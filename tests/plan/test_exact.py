"""The exact search against every plan there is."""

import pytest

from penstock.plan.cost.problem import Problem, bottleneck_s, fits_all, latency_s
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.search.exact import best_divisions
from tests.fewer import first
from tests.plan.instances import best_by_force, random_problem
from tests.spec.samples import make_cluster, make_profile


def agree(problem: Problem, aim: str = "pace") -> None:
    found = best_divisions(problem, aim=aim)  # type: ignore[arg-type]
    assert found is not None
    by_force = best_by_force(problem, aim)
    assert {n: value for n, (value, _) in found.items()} == pytest.approx(by_force, rel=1e-9)
    for size, (value, division) in found.items():
        assert fits_all(problem, division)
        assert len({stage.device for stage in division}) == len(division) == size
        assert (bottleneck_s if aim == "pace" else latency_s)(problem, division) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("start", first(2, range(0, 500, 50)))
def test_small_instances_have_optimal_plans(start: int) -> None:
    for seed in range(start, start + 50):
        agree(random_problem(seed))


def test_training_plans_are_optimal() -> None:
    for seed in range(60):
        agree(random_problem(seed, max_units=8, trains=True))


def test_latency_plans_are_optimal() -> None:
    for seed in range(60):
        agree(random_problem(seed, max_units=8), aim="latency")


def test_equal_devices_are_one_kind() -> None:
    problem = Problem(make_profile([1.0] * 60), make_cluster(*[1.0] * 20), Setting())
    found = best_divisions(problem, effort=5_000_000)
    assert found is not None
    assert found[20][0] == pytest.approx(3.0)
    assert found[7][0] == pytest.approx(9.0)


def test_bound_keeps_the_best_plan() -> None:
    for seed in range(100):
        problem = random_problem(seed)
        everything = best_divisions(problem)
        assert everything is not None
        if not everything:
            continue
        best = min(value for value, _ in everything.values())
        bounded = best_divisions(problem, at_most_s=best * 1.0001)
        assert bounded is not None
        assert min(value for value, _ in bounded.values()) == pytest.approx(best, rel=1e-9)


def test_exact_search_gives_up_beyond_its_effort() -> None:
    problem = Problem(make_profile([1.0] * 30), make_cluster(*[1 + index / 10 for index in range(9)]), Setting())
    assert best_divisions(problem, effort=1000) is None
