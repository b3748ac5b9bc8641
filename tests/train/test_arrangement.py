"""Training as a plan says: pipelines with other cuts and other parts of the batch, gradients as of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from msgspec.structs import replace

import penstock
from penstock.engine.gradients import make_buckets as engine_buckets
from penstock.engine.placement import Replica
from penstock.errors import PlanError, UsageError
from penstock.graph.cuts import Cuts, graph_fingerprint
from penstock.group.world import World
from penstock.measure.costs import held_by_units
from penstock.plan.check import check_plan
from penstock.plan.cost.predict import divisions_of
from penstock.plan.cost.problem import Problem
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.cost.training_step import make_buckets
from penstock.plan.schedule.schedules import text
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import CutSet, DeviceLoad, Plan, PlannedPipeline, PlannedStage, Prediction, write_plan
from penstock.spec.profile import Boundary, Unit
from penstock.train.arrangement import ScheduleChoice, plan_grid
from penstock.train.captured import Captured
from penstock.train.migration import fix_microbatches
from tests.fewer import long
from tests.learners import LOSSES, batches, captured, model, sgd
from tests.spec.samples import make_profile
from tests.train.test_pipeline import images, small
from tests.trainers import by_hand, errors, in_threads, make_trainer, train

# for each pipeline its microbatches, and where it is cut in parts of the model
Parts = list[tuple[int, list[float]]]


def plan_for(given: Captured, parts: Parts, schedule: str = "1f1b") -> Plan:
    """A plan by hand, its devices `d0`, `d1`, ... in order."""
    names = [cut.name for cut in Cuts(given.graph)]
    total = sum(count for count, _ in parts)
    dealt = 2 if schedule == "interleaved" else 20  # each of two devices has several stages
    devices = iter(f"d{index % dealt}" for index in range(20))
    pipelines = tuple(
        PlannedPipeline(
            stages=tuple(PlannedStage(device=next(devices)) for _ in range(len(places) + 1)),
            cut_sets=(CutSet(cuts=tuple(names[int(place * len(names))] for place in places)),),
            share=count / total,
        )
        for count, places in parts
    )
    names_used = dict.fromkeys(stage.device for p in pipelines for stage in p.stages)
    loads = tuple(DeviceLoad(device=name, load_s=1.0, memory_bytes=1.0) for name in names_used)
    return Plan(
        model=given.graph.model, graph=graph_fingerprint(given.graph), profile="", cluster="", microbatch_rows=2,
        pipelines=pipelines, loader="d0", writer="d0", schedule=schedule, num_microbatches=total,
        prediction=Prediction(rows_per_s=1.0, bound_rows_per_s=1.0, latency_s=1.0, num_rows=1, total_s=1.0, limit="d0",
                              devices=loads),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parts", "schedule"),
    [
        long("deit", [(2, [0.3]), (1, [0.7])], "1f1b"),
        ("unet", [(3, []), (2, [0.4])], "gpipe"),  # whose statistics the first replica gives to the others
        ("gpt2", [(1, []), (4, [0.2, 0.5])], "1f1b"),  # its embedding tied to the head
        long("gpt2", [(3, [0.5])], "1f1b"),
        long("gpt2", [(4, [0.2, 0.5, 0.7])], "interleaved"),
        ("deit", [(3, [0.3, 0.6])], "interleaved"),  # stages that do not divide by the devices
        long("gpt2", [(4, [0.3, 0.6])], "zero-bubble"),
        ("deit", [(2, [0.4]), (3, [0.5])], "zero-bubble"),
    ],
)
def test_gradients_are_those_of_one_process(name: str, parts: Parts, schedule: str) -> None:
    given, plan = batches(name, 2), plan_for(captured(name, torch.float32), parts, schedule)
    check_plan(plan)
    got = train(captured(name, torch.float32), len(plan.devices), given, sgd, LOSSES[name], plan=plan)
    counts = [count for count, _ in parts]
    expected = by_hand(model(name, torch.float32), given, sgd, LOSSES[name], counts)
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    for wants, gives in ((expected[1], got[1]), (expected[2], got[2])):
        alike = {key: tensor for key, tensor in wants.items() if "running" not in key and "tracked" not in key}
        assert max(errors(alike, gives).values()) < 1e-5


def test_a_device_works_through_neighbouring_stages_as_through_one() -> None:
    plan = plan_for(captured("gpt2", torch.float32), [(2, [0.5]), (1, [0.2])])
    names = [cut.name for cut in Cuts(captured("gpt2", torch.float32).graph)]
    grid, cuts = plan_grid(plan, {f"d{rank}": rank for rank in range(4)}, {n: i for i, n in enumerate(names)})
    assert cuts == [plan.pipelines[1].cut_sets[0].cuts[0], plan.pipelines[0].cut_sets[0].cuts[0]]
    assert [replica.stages for replica in grid.replicas] == [(0, 0, 1), (2, 3, 3)]
    assert [list(rows) for rows in grid.rows(7)] == [[0, 1, 2, 3, 4], [5, 6]]
    assert [list(rows) for rows in grid.rows(2)] == [[0, 1], []]


def test_the_schedule_of_a_planned_replica() -> None:
    def script(world: World) -> list[str]:
        trainer = make_trainer(given, world, plan=plan)
        found = [text(actions) for actions in trainer.now.placed.schedule(trainer.now.placed.num_microbatches)]
        trainer.close()
        return found

    given = captured("gpt2", torch.float32)
    plan = plan_for(given, [(2, [0.5]), (1, [0.2])])
    made = in_threads(4, script)
    assert made[0] == ["F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 S.1 B1.0 S.0", "F0.2 B0.2 F1.2 B1.2 S.2"]
    assert made[3] == ["F0.0 B0.0 S.0", "F0.1 F0.2 B0.2 S.2 B0.1 S.1"]


def test_an_idle_device_has_no_part_in_a_schedule() -> None:
    for name in ("1f1b", "interleaved"):
        alone = ScheduleChoice(name, 8).of(Replica((0,), (0, 0), 2), 2)
        beside = ScheduleChoice(name, 8).of(Replica((0, 1), (0, 0), 2), 2)
        assert beside == (*alone, ())


def test_plan_refuses_conflicting_training_options() -> None:
    inputs, labels = images(4)
    given = Captured(small().train(), (inputs,))
    plan, streams = (plan_for(given, [(2, [])], schedule) for schedule in ("1f1b", "forward-only"))
    with pytest.raises(UsageError, match="a plan determines the cuts"):
        penstock.Pipeline(small().train(), inputs, plan=plan, stages=1, microbatches=2)
    with penstock.Pipeline(small().train(), inputs, plan=streams) as pipe, pytest.raises(PlanError) as caught:
        pipe.train_step(inputs, labels, F.cross_entropy)
    assert "got one for inference; plan with --schedule 1f1b" in str(caught.value)
    with pytest.raises(PlanError, match=r"got one for training \(schedule 1f1b\)"):
        penstock.Pipeline(small().eval(), inputs, plan=plan)
    with pytest.raises(PlanError, match="the plan is for the graph 0000"):
        penstock.Pipeline(small().train(), inputs, plan=replace(plan, graph="0000")).train_step(inputs, labels)
    with pytest.raises(PlanError, match=r"1 device, d0, .* 2 processes"):
        in_threads(2, lambda world: make_trainer(given, world, plan=plan))


@pytest.mark.parametrize("kind", [None, Path, str])
def test_a_plan_of_one_device_trains_in_this_process(tmp_path: Path, kind: Callable[[Path], Any] | None) -> None:
    inputs, labels = images(6)
    plan = plan_for(Captured(small().train(), (inputs,)), [(3, [])])
    write_plan(tmp_path / "plan.json", plan)
    given = plan if kind is None else kind(tmp_path / "plan.json")
    with penstock.Pipeline(small().train(), inputs, plan=given) as pipe:
        assert float(pipe.train_step(inputs, labels, F.cross_entropy)) > 0
        assert pipe.trainer.now.placed.num_microbatches == 3


def test_planned_sums_have_the_buckets_of_the_run() -> None:
    given = captured("gpt2", torch.float32)
    plan = plan_for(given, [(2, [0.5]), (1, [0.2])])
    names = [cut.name for cut in Cuts(given.graph)]
    positions = [0, *(cut.position for cut in Cuts(given.graph)), len(given.graph.ops)]
    units = tuple(
        Unit(forward_s=(1.0,), backward_s=(1.0,), parameters=p) for p in held_by_units(given.graph, positions)
    )
    boundaries = tuple(Boundary(name=name, bytes_per_row=1.0) for name in ("input", *names, "output"))
    profile = msgspec.structs.replace(make_profile([1.0]), units=units, boundaries=boundaries)
    devices = tuple(Device(name=name, speed=1.0, memory_bytes=1) for name in plan.devices)
    problem = Problem(profile, Cluster(devices=devices), Setting(schedule="1f1b", num_microbatches=3))
    planned = make_buckets(problem, [divisions_of(problem, pipeline)[0] for pipeline in plan.pipelines])

    def script(world: World) -> list[tuple[int, tuple[int, ...], int]]:
        trainer = make_trainer(given, world, plan=plan)
        trainer.close()
        made = engine_buckets(trainer.now.tensors.weights(), trainer.now.order)
        return [(b.number, b.weights[0].ranks, sum(w.leaves[0].nbytes for w in b.weights)) for b in made]

    travelling = sorted({bucket for found in in_threads(4, script) for bucket in found})
    assert sorted(zip([b.devices for b in planned], [b.num_bytes for b in planned], strict=True)) == sorted(
        (ranks, num_bytes) for _, ranks, num_bytes in travelling
    )


def test_given_microbatches_cut_batches_as_before() -> None:
    """Two stages take four microbatches where nobody asks for a number, or as many as there are rows."""
    model = captured("deit", torch.float32)
    (inputs, labels), (few, few_labels) = batches("deit", 1, rows=8)[0], batches("deit", 1, rows=3)[0]

    def script(world: World) -> list[float]:
        trainer = make_trainer(model, world, stages=2)
        before = trainer.now.placed
        found = before.fixed()
        assert [replica.num_microbatches for replica in found.grid.replicas] == [4]
        assert (found.num_microbatches, found.num_stages, found.first_microbatch) == (4, 2, 0)
        assert found.schedule(4) == before.schedule(4)
        for num_rows in range(1, 9):
            for short in (False, True):
                assert found.count_microbatches(num_rows, short=short) == min(num_rows, 4)
                assert found.fixed().count_microbatches(num_rows, short=short) == min(num_rows, 4)
        losses = []
        for fixes in (False, True):
            if fixes:
                fix_microbatches(trainer)
            losses += [
                float(trainer.train_step(inputs, labels, F.cross_entropy)),
                float(trainer.train_step(few, few_labels, F.cross_entropy)),
            ]
        trainer.close()
        return losses

    first, _ = in_threads(2, script)
    assert first[:2] == first[2:]


def test_given_microbatches_hold_in_every_placement() -> None:
    def script(world: World) -> None:
        trainer = make_trainer(captured("deit", torch.float32), world, stages=2, microbatches=4)
        trainer.close()
        for placed in (trainer.now.placed, trainer.now.placed.fixed(), trainer.now.placed.fixed().fixed()):
            assert placed.num_microbatches == 4
            assert placed.count_microbatches(3, short=True) == 3
            with pytest.raises(UsageError, match="a batch of 3 rows cannot be split into 4 microbatches"):
                placed.count_microbatches(3, short=False)

    in_threads(2, script)
