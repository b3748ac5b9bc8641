"""What frozen and cached layers cost, as sums by hand; plans that move, or stay, for what that takes."""

import math
import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import Moving, make_plan, plan_again
from penstock.plan.cost.frozen import cache, freeze, keep_cuts, place_of, without_cuts
from penstock.plan.cost.predict import predict
from penstock.plan.cost.problem import Placed, Problem
from penstock.plan.cost.stage_cost import Costs, Setting
from penstock.plan.cost.training_step import play_step
from penstock.plan.schedule.schedules import SCHEDULES
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile, Unit
from tests.fewer import examples
from tests.spec.samples import make_cluster, make_profile

TRAINS = Setting(schedule="gpipe", num_microbatches=4, optimizer_state_factor=2.0)


def line(num: int = 4, *, crossing: float = 8.0, **more: object) -> Profile:
    """Units of 1 s forward and 2 s backward with a weight of 100 bytes each."""
    units = tuple(
        Unit(
            forward_s=(1.0,), backward_s=(2.0,), parameters=((f"w{n}", 100),), kept_bytes_per_row=16.0,
            working_bytes_per_row=4.0 + n,
        ) for n in range(num)
    )  # fmt: skip
    return make_profile([1.0] * num, [crossing] * (num + 1), units=units, **more)


def test_frozen_units_go_forward_alone() -> None:
    costs = Costs(freeze(line(), "unit1:after"), TRAINS)
    assert costs.forward_s.tolist() == [0, 1, 2, 3, 4]
    assert costs.backward_s.tolist() == [0, 0, 0, 2, 4]


def test_no_gradient_comes_back_into_frozen_units() -> None:
    profile = freeze(line(), "unit1:after")
    costs = Costs(profile, TRAINS)
    assert costs.crossing.tolist() == [0, 8, 8, 8, 0]
    assert costs.returning.tolist() == [0, 0, 0, 8, 0]
    assert costs.messages_bytes().tolist() == [0, 16, 16, 32, 0]
    assert freeze(freeze(line(), "unit0:after"), "unit1:after") == profile


def test_frozen_weights_count_once_in_memory() -> None:
    costs, before = Costs(freeze(line(), "unit1:after"), TRAINS), Costs(line(), TRAINS)
    held, was = costs.held_bytes - costs.working_bytes, before.held_bytes - before.working_bytes
    # weights, gradients and AdamW's two moments of what trains, and weights alone of what does not
    assert [held[1, 2], held[2, 3], held[1, 3], was[1, 3]] == [100, 400, 500, 800]
    assert costs.loaded_bytes == 8 * 4
    assert held[0, 4] == 2 * 100 + 2 * 400 + costs.loaded_bytes
    assert costs.kept_bytes.tolist() == [0, 0, 0, 16, 32]


def test_frozen_weights_take_memory_without_training_too() -> None:
    costs = Costs(freeze(line(), "unit1:after"), Setting())
    assert costs.held_bytes[0, 4] - costs.working_bytes[0, 4] == 400


def test_frozen_weights_are_neither_added_up_nor_updated() -> None:
    cluster = make_cluster(1, 1)
    whole = (Placed(0, 0, 4),), (Placed(1, 0, 4),)
    setting = Setting(schedule="gpipe", num_microbatches=4, replicated=True)
    profile = line(update_s_per_byte=0.03, sum_s_per_byte=0.01)
    plain = play_step(Problem(profile, cluster, setting), whole, [2, 2])
    frozen = play_step(Problem(freeze(profile, "unit2:after"), cluster, setting), whole, [2, 2])
    assert sum(bucket.num_bytes for bucket in plain.buckets) == 400
    assert sum(bucket.num_bytes for bucket in frozen.buckets) == 100
    assert plain.step_s - plain.all_reduced_s == pytest.approx(400 * 0.03 / 3)
    assert frozen.step_s - frozen.all_reduced_s == pytest.approx(100 * 0.03 / 3)


def test_a_cached_model_starts_after_the_boundary() -> None:
    profile = cache(freeze(line(), "unit1:after"), "unit1:after", read_s_per_row=0.25)
    assert [boundary.name for boundary in profile.boundaries] == ["input", "unit2:after", "output"]
    assert profile.units[0].forward_s == (1.25,)
    assert profile.units[0].backward_s == (2.0,)
    assert profile.units[0].fixed_bytes == 200
    assert dict(profile.units[0].parameters) == {"w2": 100}
    costs = Costs(profile, TRAINS)
    assert costs.forward_s.tolist() == [0, 1.25, 2.25]
    # weights that do not run are held beside those that do
    assert costs.held_bytes[0, 1] - costs.working_bytes[0, 1] == 200 + 400 + costs.loaded_bytes


def test_reading_takes_as_long_as_there_are_rows() -> None:
    wide = make_profile([], rows=(1, 4), boundaries=line(2).boundaries, units=tuple(
        Unit(forward_s=(1.0, 3.0), backward_s=(2.0, 6.0)) for _ in range(2)
    ))  # fmt: skip
    assert cache(freeze(wide, "unit0:after"), "unit0:after", 0.5).units[0].forward_s == (1.5, 5.0)


def test_kept_cuts_keep_sums() -> None:
    profile = freeze(line(5), "unit1:after")
    fewer = keep_cuts(profile, {"unit1:after", "unit2:after", "no such cut"})
    assert fewer.cuts == ("unit1:after", "unit2:after")
    costs, before = Costs(fewer, TRAINS), Costs(profile, TRAINS)
    places = [0, 2, 3, 5]
    for now, was in ((costs.forward_s, before.forward_s), (costs.backward_s, before.backward_s),
                     (costs.kept_bytes, before.kept_bytes), (costs.crossing, before.crossing),
                     (costs.returning, before.returning)):  # fmt: skip
        assert now.tolist() == was[places].tolist()
    for one in range(4):
        for other in range(one + 1, 4):
            assert costs.held_bytes[one, other] == before.held_bytes[places[one], places[other]]
    assert keep_cuts(profile, profile.cuts) == profile


def test_a_weight_of_two_joined_units_counts_once() -> None:
    tied = msgspec.structs.replace(
        line(3), units=tuple(msgspec.structs.replace(unit, parameters=(("w", 100),)) for unit in line(3).units)
    )
    assert keep_cuts(tied, {"unit1:after"}).units[0].parameters == (("w", 100),)


def test_unknown_cut_is_refused() -> None:
    for name in ("blocks.3:after", "input", "output"):
        with pytest.raises(PlanError, match=f"cut '{name}' not found in the profile"):
            freeze(line(), name)
    assert place_of(line(), "unit1:after") == 2


def trained(profile: Profile, cluster: Cluster, **more: object) -> Plan:
    request = PlanRequest(schedule="1f1b", num_microbatches=8, replicas=False, **more)  # type: ignore[arg-type]
    return make_plan(profile, cluster, request)


def test_a_plan_without_the_cuts_that_are_gone() -> None:
    plan = trained(line(4), make_cluster(1, 1, 1, 1))
    (pipeline,) = plan.pipelines
    assert pipeline.cut_sets[0].cuts == ("unit0:after", "unit1:after", "unit2:after")
    (fewer,) = without_cuts(plan, {"unit1:after", "unit2:after"}).pipelines
    assert fewer.cut_sets[0].cuts == ("unit1:after", "unit2:after")
    assert fewer.stages == pipeline.stages[1:]
    assert without_cuts(plan, line(4).cuts) == plan


@st.composite
def steps(draw: st.DrawFn) -> tuple[Problem, tuple[Placed, ...], str]:
    """A line of stages with their own devices, and a boundary to freeze before."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    num = draw(st.integers(2, 8))
    units = tuple(
        Unit(
            forward_s=(rng.randint(1, 9) / 4,), backward_s=(rng.randint(0, 9) / 4,),
            parameters=((f"w{n}", rng.randint(1, 40)),), kept_bytes_per_row=rng.randint(0, 9),
        ) for n in range(num)
    )  # fmt: skip
    sizes: list[float] = [rng.choice([0, 1, 5, 20]) for _ in range(num + 1)]
    profile = make_profile(
        [1.0] * num, sizes, units=units, update_s_per_byte=rng.choice([0, 0.01]),
        stage_overhead_s=rng.choice([0, 0, 0.5]), send_s_per_byte=rng.choice([0, 0, 0.05]),
    )  # fmt: skip
    cuts = sorted(draw(st.sets(st.integers(1, num - 1), max_size=3)))
    stages = tuple(Placed(n, a, b) for n, (a, b) in enumerate(pairwise([0, *cuts, num])))
    devices = tuple(
        Device(name=f"d{n}", speed=rng.choice([0.5, 1, 2]), memory_bytes=2**40, latency_s=rng.choice([0, 0.5]),
               bandwidth_bytes_per_s=rng.choice([None, 5.0]))
        for n in range(len(stages))
    )  # fmt: skip
    schedules = [name for name in SCHEDULES if not SCHEDULES[name].interleaves]
    setting = Setting(schedule=draw(st.sampled_from(schedules)), num_microbatches=draw(st.integers(1, 6)))
    boundary = profile.cuts[draw(st.integers(0, num - 2))]
    return Problem(profile, Cluster(devices=devices), setting), stages, boundary


def parted_s(problem: Problem, stages: tuple[Placed, ...]) -> float:
    """What a stage spends beside its units counts in part as forward; without a backward, in whole.

    So a forward may be longer by as much where its layers are frozen: once for each microbatch and stage at most.
    """
    costs = problem.costs
    each = costs.overhead_s + 2 * float(max(costs.before_s + costs.after_s))
    slowest = min(device.speed for device in problem.devices)
    return len(stages) * (problem.setting.num_microbatches or 0) * each / slowest


@settings(max_examples=examples(150))
@given(steps())
def test_freezing_makes_no_step_slower(given_: tuple[Problem, tuple[Placed, ...], str]) -> None:
    problem, stages, boundary = given_
    seconds = [play_step(problem, [stages], [problem.setting.num_microbatches or 1]).step_s]
    for name in problem.profile.cuts[: place_of(problem.profile, boundary)]:
        frozen = Problem(freeze(problem.profile, name), problem.cluster, problem.setting)
        seconds.append(play_step(frozen, [stages], [problem.setting.num_microbatches or 1]).step_s)
    for before, after in pairwise(seconds):
        assert after <= before + parted_s(problem, stages) + 1e-9


@settings(max_examples=examples(150))
@given(steps())
def test_a_cache_that_costs_nothing_makes_no_step_slower(given_: tuple[Problem, tuple[Placed, ...], str]) -> None:
    problem, stages, boundary = given_
    count = [problem.setting.num_microbatches or 1]
    profile = freeze(problem.profile, boundary)
    frozen = play_step(Problem(profile, problem.cluster, problem.setting), [stages], count)
    end = place_of(profile, boundary)
    left = tuple(
        Placed(stage.device, max(stage.start - end, 0), stage.end - end) for stage in stages if stage.end > end
    )
    cached = play_step(Problem(cache(profile, boundary), problem.cluster, problem.setting), [left], count)
    assert cached.step_s <= frozen.step_s + parted_s(problem, stages) + 1e-9


SLOWED = {"b": 0.25}


def again(moving: Moving | None) -> Plan:
    profile, cluster = line(8, crossing=0.0), make_cluster(1, 1, 1)
    return plan_again(trained(profile, cluster), profile, cluster, speeds=SLOWED, moving=moving)


def test_a_plan_stays_where_moving_takes_longer_than_it_gains() -> None:
    old = trained(line(8, crossing=0.0), make_cluster(1, 1, 1))
    fresh = again(None)
    assert fresh.pipelines != old.pipelines
    kept = again(Moving(cost_s=math.inf, remaining_rows=1e9))
    assert kept.pipelines == old.pipelines
    rates = kept.prediction.rows_per_s, fresh.prediction.rows_per_s
    assert rates[1] > 1.02 * rates[0]
    saved_s = 1000 / rates[0] - 1000 / rates[1]
    assert again(Moving(cost_s=saved_s * 1.01, remaining_rows=1000)).pipelines == old.pipelines
    assert again(Moving(cost_s=saved_s * 0.99, remaining_rows=1000)).pipelines == fresh.pipelines
    assert again(Moving(cost_s=0.0, remaining_rows=0.0)).pipelines == old.pipelines


def test_a_plan_moves_at_any_cost_where_a_device_is_gone() -> None:
    profile, cluster = line(8, crossing=0.0), make_cluster(1, 1, 1)
    dear = Moving(cost_s=math.inf, remaining_rows=0)
    found = plan_again(trained(profile, cluster), profile, cluster, missing={"b"}, moving=dear)
    assert set(found.devices) == {"a", "c"}


def test_replan_with_moving_costs_is_deterministic() -> None:
    for cost_s in (0.0, 100.0, math.inf):
        moving = Moving(cost_s=cost_s, remaining_rows=100)
        assert again(moving) == again(moving)


def test_repeated_replan_keeps_the_plan() -> None:
    profile, cluster = line(8, crossing=0.0), make_cluster(1, 1, 1)
    moved = again(Moving(cost_s=1.0, remaining_rows=1e6))
    stays = plan_again(moved, profile, cluster, speeds=SLOWED, moving=Moving(cost_s=1.0, remaining_rows=1e6))
    assert stays.pipelines == moved.pipelines


def test_a_plan_for_what_is_left_once_layers_are_cached() -> None:
    profile, cluster = line(8, crossing=0.0), make_cluster(1, 1, 1, 1)
    old = trained(profile, cluster)
    first = old.pipelines[0].cut_sets[0].cuts[0]
    cached = cache(freeze(profile, first), first)
    kept = plan_again(old, cached, cluster, moving=Moving(cost_s=math.inf, remaining_rows=1))
    assert kept.pipelines == without_cuts(old, cached.cuts).pipelines
    assert len(kept.devices) == 3
    moved = plan_again(old, cached, cluster, moving=Moving(cost_s=0.0, remaining_rows=1e6))
    assert len(moved.devices) == 4
    assert moved.prediction.rows_per_s > kept.prediction.rows_per_s


def test_a_plan_with_alternating_cuts_is_predicted_again() -> None:
    """Of a plan for a stream no cut is ever gone."""
    profile, cluster = make_profile([1.0] * 3), make_cluster(1, 1)
    plan = make_plan(profile, cluster, PlanRequest(replicas=False))
    assert len(plan.pipelines[0].cut_sets) == 2
    assert plan_again(plan, profile, cluster).pipelines == plan.pipelines
    assert predict(without_cuts(plan, profile.cuts), profile, cluster).pipelines == plan.pipelines
