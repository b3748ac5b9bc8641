"""A training step on the cost model: the textbook's formulas, what does not divide evenly, links."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import make_plan
from penstock.plan.cost.problem import Placed, Problem
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.cost.training_step import simulate_step
from penstock.spec.cluster import Cluster, Device, Link
from penstock.spec.profile import Unit
from tests.fewer import examples
from tests.plan.instances import random_problem
from tests.spec.samples import make_cluster, make_profile

_NAMES = "abcd"


def problem_of(
    schedule: str, forward_s: list[float], *, microbatches: int, speeds: tuple[float, ...], link_s: float = 0.0
) -> Problem:
    """One unit per stage, its backward twice its forward; each link takes so long for a message."""
    units = tuple(Unit(forward_s=(s,), backward_s=(2 * s,)) for s in forward_s)
    profile = make_profile(forward_s, [0.0] * (len(units) + 1), units=units)
    devices = tuple(
        Device(name=name, speed=speed, memory_bytes=2**40) for name, speed in zip(_NAMES, speeds, strict=False)
    )
    links = tuple(Link(between=pair, latency_s=link_s) for pair in pairwise(_NAMES[: len(devices)]))
    return Problem(
        profile, Cluster(devices=devices, links=links), Setting(schedule=schedule, num_microbatches=microbatches)
    )


def one_each(count: int) -> tuple[Placed, ...]:
    return tuple(Placed(index, index, index + 1) for index in range(count))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@settings(max_examples=examples(20), deadline=None)
@given(stages=st.integers(1, 4), microbatches=st.integers(1, 9))
def test_equal_stages_take_the_formula_s_time(schedule: str, stages: int, microbatches: int) -> None:
    problem = problem_of(schedule, [1.0] * stages, microbatches=microbatches, speeds=(1.0,) * stages)
    step = simulate_step(problem, one_each(stages))
    assert step.makespan_s == pytest.approx(3.0 * (microbatches + stages - 1))
    assert step.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_the_slowest_device_sets_the_pace() -> None:
    problem = problem_of("1f1b", [1.0, 1.0], microbatches=50, speeds=(1.0, 0.5))
    # forward through the first, 50 on the slow one, and the last one's way back
    assert simulate_step(problem, one_each(2)).makespan_s == pytest.approx(1 + 50 * 6 + 2)


def test_links_make_a_step_longer() -> None:
    fast, slow = (problem_of("gpipe", [1.0] * 3, microbatches=4, speeds=(1.0,) * 3, link_s=s) for s in (0.0, 0.25))
    apart = simulate_step(slow, one_each(3)).makespan_s - simulate_step(fast, one_each(3)).makespan_s
    assert apart == pytest.approx(4 * 0.25)  # twice through two links


@pytest.mark.parametrize("seed", range(20))
def test_no_step_is_faster_than_its_busiest_device(seed: int) -> None:
    problem = random_problem(seed, trains=True)
    count = min(len(problem.devices), problem.num_units)
    bounds = [round(index * problem.num_units / count) for index in range(count + 1)]
    division = tuple(Placed(i, a, b) for i, (a, b) in enumerate(pairwise(bounds)))
    least = max(problem.own_s(i, stage) for i, stage in enumerate(division)) * (problem.setting.num_microbatches or 1)
    assert least * (1 - 1e-9) <= simulate_step(problem, division).makespan_s < math.inf


def test_a_training_plan_is_predicted_step_by_step() -> None:
    units = tuple(Unit(forward_s=(1.0,), backward_s=(2.0,)) for _ in range(2))
    profile = make_profile([1.0, 1.0], [0.0] * 3, units=units)
    request = PlanRequest(schedule="1f1b", num_microbatches=4, num_rows=8, replicas=False)
    prediction = make_plan(profile, make_cluster(1, 1), request).prediction
    assert prediction.total_s == pytest.approx(2 * 3.0 * 5)
    assert prediction.rows_per_s == pytest.approx(8 / 30)
