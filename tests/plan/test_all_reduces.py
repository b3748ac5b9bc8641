"""Sums of gradients on the cost model, by hand: rings, what backwards hide, buckets one after the other."""

from typing import Any

import pytest

from penstock.plan.cost.all_reduces import LastBackward, all_reduced_s, make_buckets
from penstock.plan.cost.problem import Placed, Problem
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.cost.training_step import play_step
from penstock.spec.profile import Unit
from penstock.wire import BUCKET_BYTES
from tests.spec.samples import make_cluster, make_profile

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
