"""Plans for interleaved 1F1B and zero bubble: chosen, predicted and checked."""

import msgspec
import pytest

from penstock.errors import PlanError
from penstock.plan.candidates import PlanRequest
from penstock.plan.check import check_plan
from penstock.plan.choose import make_plan
from penstock.plan.cost.predict import predict
from penstock.plan.cost.problem import Placed, Problem
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.cost.training_step import interleaved_memory, simulate_step
from penstock.plan.search.partition import interleaved_divisions
from penstock.spec.plan import decode_plan, encode_plan
from penstock.spec.profile import Profile, Unit
from tests.spec.samples import make_cluster, make_profile


def trained(num_units: int, *, weights: int = 0, kept: int = 0) -> Profile:
    """Equal units of three seconds."""
    units = tuple(
        Unit(forward_s=(1.0,), backward_s=(2.0,), parameters=((f"w{i}", weights),), kept_bytes_per_row=kept)
        for i in range(num_units)
    )
    return make_profile([1.0] * num_units, [0.0] * (num_units + 1), units=units)


def rate(schedule: str, count: int = 8) -> float:
    plan = make_plan(
        trained(24), make_cluster(1, 1, 1, 1), PlanRequest(schedule=schedule, num_microbatches=count, replicas=False)
    )
    check_plan(plan)
    assert decode_plan(encode_plan(plan)) == plan
    assert len(plan.devices) == len(plan.prediction.devices) == 4
    return plan.prediction.rows_per_s


def test_steps_are_those_of_the_formulas() -> None:
    # 24 units on four devices: 18 s for each microbatch, and three times a stage to fill and drain
    assert 8 / rate("1f1b") == pytest.approx(18 * (8 + 3))
    # three stages for each device make that a third; only the weights' halves fill what zero bubble leaves
    assert 8 / rate("interleaved") == pytest.approx(18 * 8 + 3 * 6)
    assert rate("1f1b") < rate("zero-bubble")


def test_stages_are_interleaved_and_devices_are_balanced() -> None:
    plan = make_plan(trained(11), make_cluster(1, 1), PlanRequest(schedule="interleaved", num_microbatches=4))
    (pipeline,) = plan.pipelines
    assert [stage.device for stage in pipeline.stages] == ["a", "b"] * (len(pipeline.stages) // 2)
    assert sorted(load.load_s for load in plan.prediction.devices) == [15.0, 18.0]
    assert predict(plan, trained(11), make_cluster(1, 0.5)).prediction.rows_per_s < plan.prediction.rows_per_s


def test_a_fast_device_gets_more() -> None:
    plan = make_plan(trained(12), make_cluster(1, 0.5), PlanRequest(schedule="interleaved", num_microbatches=4))
    assert [round(load.load_s) for load in plan.prediction.devices] == [24, 24]


def test_memory_of_a_device_with_several_stages() -> None:
    setting = Setting(schedule="interleaved", num_microbatches=2, optimizer_state_factor=2.0)
    problem = Problem(trained(4, weights=100, kept=7), make_cluster(1, 1), setting)
    division = tuple(Placed(i % 2, i, i + 1) for i in range(4))
    # weights four times; the first device has both microbatches on both stages before it goes back
    assert interleaved_memory(problem, division) == {0: 2 * 400 + 4 * 7, 1: 2 * 400 + 3 * 7}
    small = Problem(trained(4, weights=100, kept=7), make_cluster(1, 1, memory_bytes=820), setting)
    assert interleaved_divisions(small) == []
    with pytest.raises(PlanError, match="the model does not fit"):
        make_plan(small.profile, small.cluster, PlanRequest(schedule="interleaved", num_microbatches=2,
                                                        optimizer_state_factor=2.0))  # fmt: skip


def test_zero_bubble_keeps_as_many_microbatches_on_every_stage() -> None:
    profile, request = trained(8, kept=10), PlanRequest(schedule="zero-bubble", num_microbatches=8, replicas=False)
    plan = make_plan(profile, make_cluster(1, 1, 1, 1), request)
    assert [load.memory_bytes for load in plan.prediction.devices] == [4 * 2 * 10.0] * 4
    with pytest.raises(PlanError, match=r"does not fit.*1f1b"):
        make_plan(profile, make_cluster(1, 1, 1, 1, memory_bytes=79), request)


def test_halves_of_a_backward_are_played() -> None:
    problem = Problem(trained(2), make_cluster(1, 1), Setting(schedule="zero-bubble", num_microbatches=2))
    played = simulate_step(problem, (Placed(0, 0, 1), Placed(1, 1, 2)))
    assert {span.action.kind: span.end_s - span.begin_s for own in played.spans for span in own} == {
        "F": 1.0,
        "I": 1.0,
        "W": 1.0,
    }


def test_a_plan_that_is_not_interleaved_is_refused() -> None:
    plan = make_plan(trained(8), make_cluster(1, 1), PlanRequest(schedule="interleaved", num_microbatches=4))
    (pipeline,) = plan.pipelines
    other = msgspec.structs.replace(pipeline, stages=(*pipeline.stages[:-1], pipeline.stages[0]))
    with pytest.raises(PlanError, match=r"stage 1, .*got 'a'"):
        check_plan(msgspec.structs.replace(plan, pipelines=(other,)))
    with pytest.raises(PlanError, match="be a device that holds no other stage"):
        check_plan(msgspec.structs.replace(plan, schedule="1f1b"))
    with pytest.raises(PlanError, match="got 1; use --schedule 1f1b"):
        make_plan(trained(8), make_cluster(1), PlanRequest(schedule="interleaved", num_microbatches=4))
