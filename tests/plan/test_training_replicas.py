"""Pipelines side by side for training: against every way there is on small instances, and what is chosen."""

from collections.abc import Iterator
from functools import partial
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.plan.candidates import PlanRequest, candidates_of
from penstock.plan.check import check_plan
from penstock.plan.choose import choose, make_plan
from penstock.plan.cost.problem import Division, Problem, fits_all
from penstock.plan.cost.training_step import play_step
from penstock.plan.explain import explain
from penstock.plan.search.replicas import divide_microbatches
from penstock.spec.profile import Profile, Unit
from tests.fewer import examples
from tests.plan.instances import every_division, random_problem
from tests.spec.samples import make_cluster, make_profile


def roomy(problem: Problem) -> Problem:
    """The same problem with memories that hold replicas too, most of them."""
    cluster = problem.cluster
    devices = tuple(msgspec.structs.replace(d, memory_bytes=3 * d.memory_bytes) for d in cluster.devices)
    return Problem(problem.profile, msgspec.structs.replace(cluster, devices=devices), problem.setting)


def every_step(problem: Problem) -> Iterator[tuple[float, list[Division], list[int]]]:
    """Every way to train several pipelines at once, with every division of the microbatches, that fits."""
    total = problem.setting.num_microbatches or 1
    divisions = list(every_division(problem.for_replica(1)))
    for number in range(2, min(total, len(problem.devices)) + 1):
        for chosen in combinations(divisions, number):
            devices = [stage.device for division in chosen for stage in division]
            if len(set(devices)) < len(devices):
                continue
            for edges in combinations(range(1, total), number - 1):
                counts = [b - a for a, b in zip((0, *edges), (*edges, total), strict=True)]
                if all(fits_all(problem.for_replica(n), d) for d, n in zip(chosen, counts, strict=True)):
                    yield play_step(problem, chosen, counts).step_s, list(chosen), counts


def test_plan_is_the_best_of_all_placements() -> None:
    gaps: list[float] = []
    for seed in range(120):
        problem = roomy(random_problem(seed, max_units=4, max_devices=3, trains=True))
        total = problem.setting.num_microbatches or 1
        alone = [play_step(problem, [division], [total]).step_s for division in every_division(problem)]
        by_force = min([*alone, *(step_s for step_s, _, _ in every_step(problem))], default=None)
        request = PlanRequest(schedule=problem.setting.schedule, num_microbatches=total)
        found = candidates_of(problem, request)
        assert bool(found) == (by_force is not None)
        for candidate in found:
            for load in candidate.prediction.devices:
                assert load.memory_bytes <= problem.cluster.device(load.device).memory_bytes
        if by_force is not None:
            gaps.append(min(total / candidate.prediction.rows_per_s for candidate in found) / by_force - 1)
    assert min(gaps) > -1e-9
    # pipelines are searched for their pace, and filling and draining count too
    assert sum(gap < 1e-9 for gap in gaps) > 0.9 * len(gaps) > 90
    assert max(gaps) < 0.35


def _seconds(fill: int, each: int, every: int, count: int) -> float:
    return float((fill + each * count + count // every) * bool(count))


@settings(max_examples=examples(60))
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_microbatches_are_divided_as_well_as_can_be(total: int, kinds: list[tuple[int, int, int]]) -> None:
    # each takes a while to fill, so long per microbatch, and every so many of them longer
    seconds = [partial(_seconds, *kind) for kind in kinds]
    counts = divide_microbatches(total, seconds)
    assert sum(counts) == total
    reached = max(each(count) for each, count in zip(seconds, counts, strict=True))
    edges = combinations(range(total + len(kinds) - 1), len(kinds) - 1)
    ways = ([b - a - 1 for a, b in zip((-1, *e), (*e, total + len(kinds) - 1), strict=True)] for e in edges)
    assert reached == min(max(each(n) for each, n in zip(seconds, way, strict=True)) for way in ways)


def trained(num_units: int, unit_bytes: int = 0, rows: tuple[int, ...] = (1,)) -> Profile:
    """Equal units of three seconds with weights of their own."""
    units = tuple(
        Unit(forward_s=(1.0,), backward_s=(2.0,), parameters=((f"w{index}", unit_bytes),)) for index in range(num_units)
    )
    return make_profile([1.0] * num_units, units=units, rows=rows)


def test_replicas_beat_stages_where_sums_are_cheap() -> None:
    cluster = make_cluster(1, 1, 1, 1, bandwidth_bytes_per_s=100.0)
    request = PlanRequest(schedule="1f1b", num_microbatches=8)
    cheap = choose(trained(8, 10), cluster, request)
    assert cheap.best.kind == "replicas"
    # two microbatches each, then each of four devices sends its 80 bytes to the three others
    assert 8 / cheap.plan.prediction.rows_per_s == pytest.approx(2 * 24 + 3 * 80 / 100, rel=0.01)
    assert any(
        line.startswith("replicas beat stages: replicas: 1 stage + 1 stage") for line in explain(cheap, cluster, [])
    )
    dear = choose(trained(8, 10_000), cluster, request)
    assert dear.best.kind == "stages"
    assert 8 / dear.plan.prediction.rows_per_s == pytest.approx((8 + 3) * 6)
    assert any(line.startswith("replicas do not beat stages") for line in explain(dear, cluster, []))


def test_replicas_of_stages_where_the_model_fits_two_devices() -> None:
    cluster = make_cluster(1, 1, 1, 1, memory_bytes=2000)
    plan = make_plan(trained(8, 100), cluster, PlanRequest(schedule="1f1b", num_microbatches=8))
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [2, 2]
    assert plan.microbatches == (4, 4)
    # (4 + 1) times half a model; what is added up is on no wire here
    assert 8 / plan.prediction.rows_per_s == pytest.approx(5 * 12)


def test_unequal_devices_take_parts_of_the_batch_after_their_speed() -> None:
    plan = make_plan(trained(4), make_cluster(1, 0.5), PlanRequest(schedule="gpipe", num_microbatches=6))
    check_plan(plan)
    assert plan.microbatches == (4, 2)
    assert plan.devices == ("a", "b")
    assert 6 / plan.prediction.rows_per_s == pytest.approx(48.0)


def test_the_size_of_a_step_is_that_of_all_replicas() -> None:
    profile = trained(4, rows=(1,))
    request = PlanRequest(schedule="1f1b", batch_rows=12, rows=(2, 3, 5))
    plan = make_plan(profile, make_cluster(1, 1), request)
    assert plan.batch_rows == 12
    assert sum(plan.microbatches) == plan.num_microbatches == 12 // plan.microbatch_rows
    with pytest.raises(PlanError, match=r"7 rows; got 2, 3 rows; .*--rows"):
        make_plan(profile, make_cluster(1, 1), PlanRequest(schedule="1f1b", batch_rows=7, rows=(2, 3)))
    with pytest.raises(PlanError, match=r"gpipe .*give one of"):
        PlanRequest(schedule="gpipe")
    with pytest.raises(PlanError, match="the size of a step is for training"):
        PlanRequest(num_microbatches=4)
