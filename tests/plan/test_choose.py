"""Plans as a whole: what is chosen, what it is predicted to do, and what is said where nothing fits."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from penstock.errors import PlanError
from penstock.plan.candidates import PlanRequest
from penstock.plan.check import check_cuts, check_devices, check_plan
from penstock.plan.choose import choose, make_plan, memory_that_would_do, plan_again
from penstock.plan.cost.predict import predict
from penstock.plan.cost.problem import Placed, Problem, bottleneck_bound_s
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.explain import noise_lines
from penstock.plan.search.replicas import rates_of
from penstock.spec.cluster import Cluster, Device, parse_cluster, write_cluster
from penstock.spec.plan import decode_plan, encode_plan
from penstock.spec.profile import RuntimeColumn, Unit
from tests.plan.instances import random_problem
from tests.spec.samples import make_cluster, make_profile

PLAIN = PlanRequest(alternate=False, replicas=False, num_rows=100)


def weigh(num_units: int, unit_bytes: int) -> tuple[Unit, ...]:
    return tuple(Unit(forward_s=(1.0,), parameters=((f"w{index}", unit_bytes),)) for index in range(num_units))


def test_equal_devices_get_equal_parts() -> None:
    plan = make_plan(make_profile([1.0] * 8), make_cluster(1, 1, 1, 1), PLAIN)
    assert plan.pipelines[0].cut_sets[0].cuts == ("unit1:after", "unit3:after", "unit5:after")
    assert plan.prediction.rows_per_s == pytest.approx(0.5)
    assert plan.prediction.total_s == pytest.approx(100 * 2 + 3 * 2)
    assert plan.prediction.latency_s == pytest.approx(8)
    assert plan.prediction.bound_rows_per_s == pytest.approx(0.5)


def test_unequal_devices_get_parts_after_their_speed() -> None:
    plan = make_plan(make_profile([1.0] * 25), make_cluster(0.5, 0.35, 0.25, 0.15), PLAIN)
    assert plan.prediction.rows_per_s == pytest.approx(0.05)
    assert [load.load_s for load in plan.prediction.devices] == [pytest.approx(20.0)] * 4


def test_a_device_that_only_costs_is_left_out() -> None:
    profile = make_profile([1.0, 1.0], [0, 100, 0], send_s_per_byte=1.0)
    plan = make_plan(profile, make_cluster(1, 1), PLAIN)
    assert plan.devices == ("a",)


def test_cut_sets_rotate_where_units_do_not_divide() -> None:
    profile = make_profile([1.0] * 18)
    plan = make_plan(profile, make_cluster(1, 1, 1, 1), PlanRequest(replicas=False))
    assert len(plan.pipelines[0].cut_sets) > 1
    # eighteen units on four devices: one set gives a pace of 5, rotation 4.5
    assert plan.prediction.rows_per_s > 0.99 / 4.5
    plain = make_plan(profile, make_cluster(1, 1, 1, 1), PLAIN)
    assert plain.prediction.rows_per_s == pytest.approx(1 / 5)


def test_rotation_keeps_to_the_memory() -> None:
    profile = make_profile([1.0] * 18, units=weigh(18, 100))
    loose = make_plan(profile, make_cluster(1, 1, 1, 1, memory_bytes=700), PlanRequest(replicas=False))
    assert len(loose.pipelines[0].cut_sets) > 1
    tight = make_plan(profile, make_cluster(1, 1, 1, 1, memory_bytes=500), PlanRequest(replicas=False))
    assert max(load.memory_bytes for load in tight.prediction.devices) <= 500


def test_a_model_that_fits_every_device_is_replicated() -> None:
    profile = make_profile([1.0, 5.0, 1.0], [0, 50, 50, 0], send_s_per_byte=0.01, receive_s_per_byte=0.01)
    choice = choose(profile, make_cluster(1, 0.5, 0.25), PlanRequest())
    assert choice.best.kind == "replicas"
    assert choice.plan.prediction.rows_per_s == pytest.approx(1.75 / 7)


def test_driver_keeps_a_model_that_is_cheaper_than_its_messages() -> None:
    profile = make_profile([0.01], feed_s=0.5, result_s=0.5, stage_overhead_s=0.4, own_input_s=0.3, own_output_s=0.3)
    plan = make_plan(profile, make_cluster(1, 0.5), PlanRequest())
    check_plan(plan)
    assert plan.prediction.rows_per_s >= 1 / (0.01 + 0.4 + 1.0 - 0.6) * (1 - 1e-9)


def test_half_of_a_model_on_each_of_four_devices() -> None:
    # stages of at most two units: two pipelines of two devices, or one of four
    profile = make_profile([1.0] * 3, [0, 9, 9, 0], send_s_per_byte=0.05, units=weigh(3, 100))
    choice = choose(profile, make_cluster(1, 1, 1, 1, memory_bytes=200), PlanRequest(alternate=False))
    check_plan(choice.plan)
    assert choice.plan.prediction.rows_per_s > 1 / 1.9
    assert max(load.memory_bytes for load in choice.plan.prediction.devices) <= 200


def test_the_feeder_has_less_time_for_its_stage() -> None:
    profile = make_profile([1.0] * 10, loader_s_per_row=1.0, feed_s=0.5, result_s=0.5)
    plan = make_plan(profile, make_cluster(1, 1), PLAIN)
    loads = {load.device: load.load_s for load in plan.prediction.devices}
    assert loads == {"a": pytest.approx(6.0), "b": pytest.approx(6.0)}
    assert plan.loader == "a"


def test_a_slow_link_moves_the_cut() -> None:
    profile = make_profile([1.0, 1.0, 1.0, 1.0], [1, 100, 1, 100, 1])
    plan = make_plan(profile, make_cluster(1, 1, bandwidth_bytes_per_s=10.0), PLAIN)
    assert plan.pipelines[0].cut_sets[0].cuts == ("unit1:after",)


def test_microbatches_as_large_as_memory_allows() -> None:
    units = tuple(Unit(forward_s=(1.0, 1.2, 2.0), working_bytes_per_row=100) for _ in range(4))
    profile = make_profile([1.0] * 4, units=units, rows=(1, 2, 4))
    assert make_plan(profile, make_cluster(1, 1), PLAIN).microbatch_rows == 4
    assert make_plan(profile, make_cluster(1, 1, memory_bytes=250), PLAIN).microbatch_rows == 2


def test_the_smallest_latency_may_be_one_device() -> None:
    profile = make_profile([1.0] * 4, [0, 8, 8, 8, 0])
    cluster = make_cluster(1, 1, latency_s=0.5)
    assert make_plan(profile, cluster, PlanRequest(aim="latency")).devices == ("a",)
    assert len(make_plan(profile, cluster, PLAIN).devices) == 2


def test_the_fewest_devices_for_a_target() -> None:
    profile, cluster = make_profile([1.0] * 12), make_cluster(1, 1, 1, 1, 1, 1)
    request = PlanRequest(aim="devices", target_rows_per_s=0.25, replicas=False, alternate=False)
    assert len(make_plan(profile, cluster, request).devices) == 3
    with pytest.raises(PlanError, match=r" 9 rows/s.* 0\.5 rows/s .*6 devices"):
        make_plan(profile, cluster, PlanRequest(aim="devices", target_rows_per_s=9.0, replicas=False))
    with pytest.raises(PlanError, match="--target in rows per second"):
        PlanRequest(aim="devices")


def test_plan_that_does_not_fit_names_what_would() -> None:
    profile = make_profile([1.0] * 8, units=weigh(8, 1000))
    cluster = make_cluster(1, 1, memory_bytes=3000)
    with pytest.raises(PlanError) as caught:
        make_plan(profile, cluster, PLAIN)
    message = str(caught.value)
    assert "the model does not fit: it needs 8 kB" in message
    assert "a has 3 kB, 1 kB less than an equal share" in message
    assert "4 kB on each of 2 devices" in message
    fitting = make_cluster(1, 1, memory_bytes=4000)
    assert make_plan(profile, fitting, PLAIN).devices == ("a", "b")


def test_a_unit_too_large_for_any_device() -> None:
    profile = make_profile([1.0] * 2, units=weigh(2, 1000))
    with pytest.raises(PlanError, match=r"input and unit0:after .* 1 kB, .* 100 B"):
        make_plan(profile, make_cluster(1, 1, memory_bytes=900), PLAIN)


def test_named_memory_is_enough() -> None:
    for seed in range(60):
        problem = random_problem(seed, trains=seed % 2 == 0)
        memory = memory_that_would_do(problem)
        devices = [msgspec.structs.replace(d, memory_bytes=int(memory) + 1) for d in problem.devices]
        cluster = msgspec.structs.replace(problem.cluster, devices=tuple(devices))
        request = PlanRequest(
            alternate=False, replicas=False, depth=problem.setting.depth, schedule=problem.setting.schedule,
            num_microbatches=problem.setting.num_microbatches,
            optimizer_state_factor=problem.setting.optimizer_state_factor,
        )  # fmt: skip
        check_plan(make_plan(problem.profile, cluster, request))


def test_any_plan_is_sound_and_keeps_its_promises() -> None:
    for seed in range(120):
        problem = random_problem(seed, max_units=8)
        profile, cluster = problem.profile, problem.cluster
        try:
            choice = choose(profile, cluster, PlanRequest(num_rows=50, depth=problem.setting.depth))
        except PlanError:
            continue
        plan = choice.plan
        check_plan(plan)
        check_cuts(plan, profile.cuts)
        check_devices(plan, cluster)
        assert decode_plan(encode_plan(plan)) == plan
        for load in plan.prediction.devices:
            assert load.memory_bytes <= cluster.device(load.device).memory_bytes
            assert load.load_s * plan.prediction.rows_per_s <= 1 + 1e-6
        rates = [c.prediction.rows_per_s for c in (choice.best, *choice.others)]
        assert rates[0] >= max(rates) * (1 - 2e-3)
        bound = bottleneck_bound_s(problem, share=True)
        assert not bound or plan.prediction.rows_per_s <= 1 / bound * (1 + 1e-6)
        again = predict(plan, profile, cluster)
        assert again.prediction.rows_per_s == pytest.approx(plan.prediction.rows_per_s)


def test_a_training_plan() -> None:
    units = tuple(Unit(forward_s=(1.0,), backward_s=(2.0,), kept_bytes_per_row=10) for _ in range(8))
    profile = make_profile([1.0] * 8, units=units)
    request = PlanRequest(schedule="1f1b", num_microbatches=8, num_rows=8, replicas=False)
    plan = make_plan(profile, make_cluster(1, 1, 1, 1, memory_bytes=10**6), request)
    assert plan.num_microbatches == 8
    assert len(plan.pipelines[0].cut_sets) == 1
    # seven microbatches at the pace of the busiest stage behind the first one's way through
    assert plan.prediction.total_s == pytest.approx(24 + 7 * 6)
    kept = [load.memory_bytes for load in plan.prediction.devices]
    assert kept == [80, 60, 40, 20]
    with pytest.raises(PlanError, match="the schedule 1f1b needs the size of a step"):
        make_plan(profile, make_cluster(1), PlanRequest(schedule="1f1b"))
    with pytest.raises(PlanError, match=r"units\[0\] .*--training"):
        make_plan(make_profile([1.0]), make_cluster(1), request)


def test_cut_names_are_in_order() -> None:
    devices = tuple(Device(name=f"d{k}", speed=0.2 + k % 7 / 10, memory_bytes=2**30) for k in range(40))
    profile = make_profile([1.0 + k % 5 for k in range(300)])
    plan = make_plan(profile, Cluster(devices=devices), PlanRequest(replicas=False, alternate=False))
    positions = [profile.cuts.index(name) for name in plan.pipelines[0].cut_sets[0].cuts]
    assert all(a < b for a, b in pairwise(positions))


def test_driver_stage_sends_no_input_over_links() -> None:
    # 100 bytes go in and 1 crosses the cut; a link takes 10 bytes per second
    profile = make_profile([1.0, 1.0], [100.0, 1.0, 0.0])
    cluster = make_cluster(1, 1, bandwidth_bytes_per_s=10.0)
    made = make_plan(profile, cluster, PlanRequest(replicas=False, alternate=False))
    assert made.devices == ("a", "b")
    assert made.prediction.rows_per_s == pytest.approx(1.0)
    # side by side the other one's input crosses, one in ten seconds, and the feeder's own does not
    assert rates_of(Problem(profile, cluster, Setting()), [(Placed(n, 0, 2),) for n in (0, 1)]) == [
        pytest.approx(0.5),
        pytest.approx(0.1),
    ]


def columns() -> tuple[RuntimeColumn, ...]:
    """Near and twice as fast, further off and four times as fast, and one that is slower than eager."""
    return (
        RuntimeColumn(runtime="onnxruntime", precision="float32", forward_s=(1.0,), eager_s=(2.0,), error=1e-6),
        RuntimeColumn(runtime="openvino", precision="bfloat16", forward_s=(0.5,), eager_s=(2.0,), error=0.01),
        RuntimeColumn(runtime="eager", precision="bfloat16", forward_s=(3.0,), eager_s=(2.0,), error=0.005),
    )


@pytest.mark.parametrize(
    ("max_error", "runtime", "times"),
    [(0.0, ("eager", "float32"), 1.0), (1e-3, ("onnxruntime", "float32"), 2.0),
     (0.007, ("onnxruntime", "float32"), 2.0), (0.02, ("openvino", "bfloat16"), 4.0)],
)  # fmt: skip
def test_the_fastest_runtime_that_is_near_enough(max_error: float, runtime: tuple[str, str], times: float) -> None:
    profile = msgspec.structs.replace(make_profile([1.0] * 8), runtimes=columns())
    cluster = make_cluster(1, 1, 1, 1)
    plain, plan = (make_plan(profile, cluster, replace(PLAIN, max_error=error)) for error in (None, max_error))
    assert {(stage.runtime, stage.precision) for stage in plan.pipelines[0].stages} == {runtime}
    assert plan.prediction.rows_per_s == pytest.approx(times * plain.prediction.rows_per_s)
    assert predict(plan, profile, cluster).prediction.rows_per_s == pytest.approx(plan.prediction.rows_per_s)
    assert decode_plan(encode_plan(plan)) == plan
    fewer = plan_again(plan, profile, cluster, missing={"d"})
    assert {(stage.runtime, stage.precision) for stage in fewer.pipelines[0].stages} == {runtime}


def test_each_device_computes_on_the_fastest_runtime_that_it_has() -> None:
    profile = msgspec.structs.replace(make_profile([1.0] * 14), runtimes=columns())
    devices = make_cluster(1, 1, 1).devices
    has = [None, ("onnxruntime",), ()]
    cluster = Cluster(
        devices=tuple(
            msgspec.structs.replace(device, runtimes=names) for device, names in zip(devices, has, strict=True)
        )
    )
    assert parse_cluster(write_cluster(cluster)).devices == cluster.devices
    request = replace(PLAIN, max_error=0.02)
    plan = make_plan(profile, cluster, request)
    used = {stage.device: stage.runtime for stage in plan.pipelines[0].stages}
    assert used == {"a": "openvino", "b": "onnxruntime", "c": "eager"}
    assert plan.prediction.rows_per_s == pytest.approx(0.5)  # eight, four and two units in two seconds
    assert [load.load_s for load in plan.prediction.devices] == [pytest.approx(2.0)] * 3
    assert predict(plan, profile, cluster).prediction.rows_per_s == pytest.approx(0.5)
    fewer = plan_again(plan, profile, cluster, missing={"c"})
    found = {stage.device: stage.runtime for each in fewer.pipelines for stage in each.stages}
    assert found == {name: used[name] for name in "ab"}
    wrong = Cluster(devices=tuple(msgspec.structs.replace(device, runtimes=("abacus",)) for device in devices))
    with pytest.raises(PlanError, match=r"a has the runtime abacus, .*; profile again"):
        make_plan(profile, wrong, request)


def test_max_error_needs_profiled_runtimes_and_inference() -> None:
    with pytest.raises(PlanError, match=r"eager; .*--runtime"):
        make_plan(make_profile([1.0] * 4), make_cluster(1, 1), replace(PLAIN, max_error=0.1))
    with pytest.raises(PlanError, match="leave --max-error out"):
        PlanRequest(schedule="1f1b", num_microbatches=4, max_error=0.1)


def test_layers_that_stay_in_float32_stay_so_in_a_plan() -> None:
    kept = RuntimeColumn(
        runtime="onnxruntime", precision="int8", keep=("head",), forward_s=(0.5,), eager_s=(2.0,), error=0.01
    )
    alone = RuntimeColumn(runtime="onnxruntime", precision="int8", forward_s=(0.4,), eager_s=(2.0,), error=0.1)
    profile = msgspec.structs.replace(make_profile([1.0] * 8), runtimes=(alone, kept))
    plan = make_plan(profile, make_cluster(1, 1), replace(PLAIN, max_error=0.02))
    assert {(stage.precision, stage.keep) for stage in plan.pipelines[0].stages} == {("int8", ("head",))}
    again = predict(plan, profile, make_cluster(1, 1))
    assert again.prediction.rows_per_s == pytest.approx(plan.prediction.rows_per_s)


def test_plans_within_the_noise_of_the_profile_are_counted() -> None:
    units = tuple(Unit(forward_s=(1.0,), forward_spread_s=(0.06,)) for _ in range(8))
    profile = make_profile([1.0] * 8, units=units)
    choice = choose(profile, make_cluster(1, 1), PlanRequest(alternate=False))
    (line,) = noise_lines(choice, profile)
    near = [c for c in choice.others if c.prediction.rows_per_s >= 0.94 * choice.plan.prediction.rows_per_s]
    assert line.startswith("differences below 6.0% are not decided")
    assert ("1 other plan is that near" in line) == (len(near) == 1)
    assert ("other plan" in line) == bool(near)
    assert noise_lines(choice, make_profile([1.0] * 8)) == []


def test_counted_costs_are_planned_for_the_runtime_whose_bytes_they_have() -> None:
    stored = RuntimeColumn(runtime="onnxruntime", precision="stored", forward_s=(1.0,), eager_s=(1.0,), error=0.0)
    profile = msgspec.structs.replace(make_profile([1.0] * 4), runtimes=(stored,))
    counted = msgspec.structs.replace(profile, device="counted")
    assert make_plan(counted, make_cluster(1, 1), PLAIN).runtimes == ["onnxruntime:stored"]
    assert make_plan(profile, make_cluster(1, 1), PLAIN).runtimes == ["eager"]
