"""A training step on the cost model: the textbook's formulas, what does not divide evenly, links, sums of gradients."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import make_plan
from penstock.plan.cost.problem import Placed, Problem
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.cost.training_step import LastBackward, all_reduced_s, make_buckets, play_step, simulate_step
from penstock.spec.cluster import Cluster, Device, Link
from penstock.spec.profile import Unit
from penstock.wire import BUCKET_BYTES
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
@settings(max_examples=examples(20))
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


A_SECOND = BUCKET_BYTES // 4  # bytes on the wire


def problem(*weights: tuple[tuple[str, int], ...], devices: int = 2, **more: Any) -> Problem:
    """A unit for each group of weights, a second forward and two back; links of a quarter bucket a second."""
    units = tuple(Unit(forward_s=(1.0,), backward_s=(2.0,), parameters=own) for own in weights)
    fields = {name: more.pop(name) for name in list(more) if "_s_per_" in name or name in {"feed_s", "result_s"}}
    profile = make_profile([1.0] * len(units), units=units, **fields)
    cluster = make_cluster(*[1.0] * devices, bandwidth_bytes_per_s=float(A_SECOND), **more)
    return Problem(profile, cluster, Setting(schedule="1f1b", num_microbatches=2))


def test_a_ring_of_replicas() -> None:
    given = problem((("w", A_SECOND),), devices=4, latency_s=0.01)
    whole = [(Placed(number, 0, 1),) for number in range(4)]
    (bucket,) = make_buckets(given, whole)
    assert (bucket.devices, bucket.num_bytes) == ((0, 1, 2, 3), A_SECOND)
    # six parts, a quarter each, one after the other
    assert bucket.seconds(given) == pytest.approx(6 * (0.25 + 0.01))
    step = play_step(given, whole, [1] * 4)
    assert step.computed_s == pytest.approx(3.0)
    assert step.all_reduced_s == pytest.approx(3.0 + 6 * 0.26)


def test_small_bucket_is_broadcast() -> None:
    given = problem((("w", 8 * 2**10),), devices=4, latency_s=0.01, feed_s=0.001, result_s=0.002)
    (bucket,) = make_buckets(given, [(Placed(number, 0, 1),) for number in range(4)])
    wire_s = 3 * 8 * 2**10 / A_SECOND
    # one hop, and the CPU time of three messages sent and three received
    assert bucket.seconds(given) == pytest.approx(wire_s + 0.01 + 3 * 0.003)


def test_step_outcome_is_sent_to_every_device() -> None:
    parted = [(Placed(0, 0, 1), Placed(1, 1, 2), Placed(2, 2, 3))]
    weights = [((name, 4),) for name in "abc"]
    free, costly = (
        play_step(problem(*weights, devices=3, **more), parted, [2])
        for more in ({}, {"latency_s": 0.01, "feed_s": 0.001, "result_s": 0.002})
    )
    assert free.step_s == free.all_reduced_s
    assert costly.step_s - costly.all_reduced_s == pytest.approx(0.01 + 2 * 0.003)


def test_backwards_hide_the_wire_but_not_the_cpu_time() -> None:
    weights = ((("a", A_SECOND // 2),), (("b", BUCKET_BYTES),))
    pair = [(Placed(0, 0, 2),), (Placed(1, 0, 2),)]
    given = problem(*weights)
    late, early = make_buckets(given, pair)
    assert (late.first_units, early.first_units) == ({0: 1, 1: 1}, {0: 0, 1: 0})
    # b is final after half of the last backward and takes four seconds, two of them hidden; then a
    step = play_step(given, pair, [1, 1])
    assert step.computed_s == pytest.approx(6.0)
    assert step.all_reduced_s == pytest.approx(4.0 + 4.0 + 0.5)
    costly = problem(*weights, send_s_per_byte=1.0 / A_SECOND, receive_s_per_byte=1.0 / A_SECOND)
    # two seconds for what takes one on the wire
    assert play_step(costly, pair, [1, 1]).all_reduced_s == pytest.approx(4.0 + 12.0 + 1.5)
    copied = problem(*weights, sum_s_per_byte=1.0 / A_SECOND)
    assert play_step(copied, pair, [1, 1]).all_reduced_s == pytest.approx(4.0 + 8.0 + 1.0)


def test_a_bucket_waits_for_the_last_of_its_devices() -> None:
    given = problem((("w", A_SECOND),))
    stage = Placed(0, 0, 1)
    buckets = make_buckets(given, [(stage,), (Placed(1, 0, 1),)])
    last = {0: [LastBackward(stage, 1.0, 3.0)], 1: [LastBackward(stage, 5.0, 7.0)]}
    assert all_reduced_s(given, buckets, last) == pytest.approx(8.0)


def test_a_weight_of_two_stages_is_added_up_without_replicas() -> None:
    given = problem((("tied", A_SECOND),), (("own", A_SECOND),), (("tied", A_SECOND), ("last", A_SECOND)))
    alone = (Placed(0, 0, 3),)
    assert make_buckets(given, [alone]) == []
    parted = (Placed(0, 0, 2), Placed(1, 2, 3))
    (bucket,) = make_buckets(given, [parted])
    assert (bucket.devices, bucket.num_bytes, bucket.first_units) == ((0, 1), A_SECOND, {0: 0, 1: 2})


def test_pipelines_with_other_cuts_share_no_buckets_across_them() -> None:
    given = problem(*[((name, 4 * 2**10),) for name in "abcd"], devices=4)
    divisions = [(Placed(0, 0, 2), Placed(1, 2, 4)), (Placed(2, 0, 3), Placed(3, 3, 4))]
    buckets = make_buckets(given, divisions)
    assert [bucket.devices for bucket in buckets] == [(1, 3), (1, 2), (0, 2)]
    assert [bucket.num_bytes for bucket in buckets] == [4096, 4096, 8192]


def test_update_and_loading_come_behind_the_sums() -> None:
    given = problem((("w", A_SECOND),), (("v", 3 * A_SECOND),), update_s_per_byte=1.0 / A_SECOND, loader_s_per_row=0.5)
    parted = [(Placed(0, 0, 1), Placed(1, 1, 2))]
    step = play_step(given, parted, [2])
    # plain SGD touches a third of what AdamW does; both ends load two rows
    assert step.step_s - step.all_reduced_s == pytest.approx(1.0 + 2 * 0.5)
