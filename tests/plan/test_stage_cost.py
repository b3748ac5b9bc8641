"""Costs by hand: seconds, shared tensors, memory by schedule, the feeder's extra work, links."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.cost.problem import Placed, Problem, bottleneck_s, latency_s
from penstock.plan.cost.stage_cost import Costs, Setting
from penstock.spec.cluster import Cluster, Device, Link
from penstock.spec.profile import Unit
from tests.fewer import examples
from tests.plan.instances import random_problem
from tests.spec.samples import make_cluster, make_profile


def test_a_tensor_that_two_units_share_is_held_once() -> None:
    units = (
        Unit(forward_s=(1.0,), parameters=(("tied", 100), ("a", 1))),
        Unit(forward_s=(1.0,), parameters=(("b", 10),)),
        Unit(forward_s=(1.0,), parameters=(("tied", 100),), working_bytes_per_row=7, working_bytes=3),
    )
    held = Costs(make_profile([1.0] * 3, units=units), Setting(rows=2)).held_bytes
    assert held[0, 3] == 111 + 17
    assert held[0, 2] == 111
    assert held[2, 3] == 100 + 17


def test_training_holds_gradients_optimizer_state_and_what_backwards_need() -> None:
    units = tuple(
        Unit(forward_s=(1.0,), backward_s=(2.0,), kept_bytes_per_row=5, parameters=((f"w{i}", 100),)) for i in range(2)
    )
    profile = make_profile([1.0] * 2, units=units)
    setting = Setting(schedule="gpipe", num_microbatches=6, optimizer_state_factor=2.0)
    problem = Problem(profile, make_cluster(1, 1), setting)
    assert setting.in_flight(1) == setting.in_flight(2) == 6
    assert problem.costs.total_s == 6.0
    assert problem.memory_bytes(1, 1, 2, in_flight=6) == 4 * 100 + 6 * 5
    assert Setting(schedule="1f1b", num_microbatches=6).in_flight(4) == 4
    assert Setting().in_flight(4) == 0


def test_outputs_wait_for_their_gradients() -> None:
    units = tuple(Unit(forward_s=(1.0,), backward_s=(2.0,)) for _ in range(2))
    profile = make_profile([1.0] * 2, [0, 10, 0], units=units)
    problem = Problem(profile, make_cluster(1, 1), Setting(schedule="1f1b", num_microbatches=6, depth=1))
    # two messages at the cut, there and back; and two microbatches' outputs, which only the first stage has
    assert problem.memory_bytes(0, 0, 1, in_flight=2) == 20 + 20
    assert problem.memory_bytes(1, 1, 2, in_flight=2) == 20


def test_gradients_of_a_tied_weight() -> None:
    units = tuple(
        Unit(forward_s=(1.0,), backward_s=(2.0,), parameters=(("tied", 100),) if i != 1 else ()) for i in range(3)
    )
    costs = Costs(make_profile([1.0] * 3, units=units), Setting(schedule="1f1b", num_microbatches=2))
    # weights and gradients, and the first one that waits for the other
    assert costs.held_bytes[0, 3] == 2 * 100 + 100
    # or the bucket, and half of it from the other stage
    assert costs.held_bytes[0, 1] == costs.held_bytes[1, 3] == 2 * 100 + 150
    assert costs.held_bytes[1, 2] == 0


def test_buckets_of_replicas() -> None:
    units = (Unit(forward_s=(1.0,), backward_s=(2.0,), parameters=(("w", 100), ("v", 50))),)
    setting = Setting(schedule="1f1b", num_microbatches=2, replicated=True)
    # one that is laid out, and of two under way half
    assert Costs(make_profile([1.0], units=units), setting).held_bytes[0, 1] == 2 * 150 + 2 * 150


def test_driver_and_training_devices_hold_the_script() -> None:
    profile = make_profile(
        [1.0], base_bytes=100.0, script_bytes=30.0, units=(Unit(forward_s=(1.0,), backward_s=(1.0,)),)
    )
    streams = Problem(profile, make_cluster(1, 1), Setting())
    assert [streams.memory_bytes(device, 0, 1, in_flight=0) for device in (0, 1)] == [130, 100]
    trains = Problem(profile, make_cluster(1, 1), Setting(schedule="1f1b", num_microbatches=1))
    assert [trains.memory_bytes(device, 0, 1, in_flight=1) for device in (0, 1)] == [130, 130]


def test_compute_driver_or_link_sets_the_pace() -> None:
    profile = make_profile([1.0, 1.0], [10, 40, 20], send_s_per_byte=0.01, receive_s_per_byte=0.02)
    cluster = Cluster(
        devices=(
            Device(name="a", speed=1.0, memory_bytes=2**40, bandwidth_bytes_per_s=100.0),
            Device(name="b", speed=0.5, memory_bytes=2**40, bandwidth_bytes_per_s=10.0),
        )
    )
    problem = Problem(profile, cluster, Setting())
    # its own unit, 40 bytes sent and 20 received as the feeder
    assert problem.load_s(0, 0, 1) == pytest.approx(1 + 0.4 + 0.4)
    # its link in is slower than its computing: (1 + 40 * 0.02 + 20 * 0.01) / 0.5
    assert problem.load_s(1, 1, 2) == pytest.approx(4.0)
    assert problem.limit(1, 1, 2) in {"compute", "link in"}
    halves = (Placed(0, 0, 1), Placed(1, 1, 2))
    assert bottleneck_s(problem, halves) == pytest.approx(4.0)
    # the way through: both stages, 40 bytes to b and 20 back, each at b's 10 bytes per second
    assert latency_s(problem, halves) == pytest.approx((1 + 0.4) + 4.0 + 4.0 + 2.0)


def test_driver_saves_messages_at_its_own_ends() -> None:
    profile = make_profile(
        [1.0, 1.0], [0, 0, 0], stage_overhead_s=0.5, feed_s=0.2, result_s=0.2, own_input_s=0.3, own_output_s=0.1
    )
    problem = Problem(profile, make_cluster(1, 1), Setting())
    assert problem.load_s(0, 0, 2) == pytest.approx(2 + 0.5 + 0.4 - 0.3 - 0.1)
    assert problem.load_s(0, 0, 1) == pytest.approx(1 + 0.5 + 0.4 - 0.3)
    assert problem.load_s(0, 1, 2) == pytest.approx(1 + 0.5 + 0.4 - 0.1)
    # a device that does not feed, and a feeder without a stage, are spared nothing
    assert problem.load_s(1, 0, 2) == pytest.approx(2 + 0.5)
    assert problem.feeding_only_s() == pytest.approx(0.4)


def test_slow_link_between_two_devices_sets_the_pace() -> None:
    profile = make_profile([1.0, 1.0], [0, 8, 0])
    cluster = Cluster(
        devices=make_cluster(1, 1).devices, links=(Link(between=("a", "b"), bandwidth_bytes_per_s=2.0, latency_s=0.5),)
    )
    problem = Problem(profile, cluster, Setting())
    halves = (Placed(0, 0, 1), Placed(1, 1, 2))
    assert bottleneck_s(problem, halves) == pytest.approx(4.0)
    assert latency_s(problem, halves) == pytest.approx(1 + 4.5 + 1 + 0.5)


@settings(max_examples=examples(50))
@given(st.integers(0, 300), st.booleans())
def test_blocks_agree_with_single_stages(seed: int, trains: bool) -> None:
    problem = random_problem(seed, trains=trains)
    in_flight = problem.setting.in_flight(2)
    for device in range(len(problem.devices)):
        block = problem.cost_block(device, in_flight, slice(0, None), slice(0, None))
        for start in range(problem.num_units + 1):
            for end in range(problem.num_units + 1):
                if start >= end or not problem.fits(device, start, end, in_flight):
                    assert block[start, end] == np.inf
                else:
                    assert block[start, end] == pytest.approx(problem.load_s(device, start, end))
