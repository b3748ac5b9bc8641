"""Validation of a plan, alone and against its inputs, with one-line errors that name the field and the reason."""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.errors import PlanError
from penstock.plan.schedule.schedules import DEFAULT_SCHEDULE, SCHEDULES, interleaves
from penstock.spec.cluster import Cluster
from penstock.spec.fields import NAME_RULE, is_name, read_bytes
from penstock.spec.plan import Plan, PlannedPipeline, decode_plan
from penstock.text import counted

# tolerance for sums of weights and shares, which are floats
_ROUNDING = 1e-6


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file and validate it.

    Example:
        plan = read_plan("plan.json")

    Raises `PlanError` with the path, the invalid field and the reason.
    """
    data = read_bytes(path, "a plan", PlanError)
    try:
        plan = decode_plan(data)
        check_plan(plan)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return plan


def check_plan(plan: Plan) -> None:
    """Raise `PlanError` unless the plan is consistent.

    Devices must be used once, weights and shares must add up to 1, cut sets must have one cut fewer than there are
    stages, and numbers must be in range.
    """
    if plan.version != 1:
        _refuse("version", "be 1 in this penstock", plan.version)
    for field in ("microbatch_rows", "depth"):
        if getattr(plan, field) < 1:
            _refuse(field, "be at least 1", getattr(plan, field))
    _check_schedule(plan)
    for field in ("loader", "writer"):
        _check_name(field, getattr(plan, field))
    if not plan.pipelines:
        _refuse("pipelines", "have at least one pipeline", [])
    _check_parts("pipelines[*].share", [pipeline.share for pipeline in plan.pipelines])
    for index, pipeline in enumerate(plan.pipelines):
        _check_pipeline(f"pipelines[{index}]", pipeline)
    _check_devices_once(plan)
    _check_prediction(plan)


def check_purpose(plan: Plan, *, trains: bool) -> None:
    """Raise `PlanError` unless the plan's purpose, training or inference, matches `trains`."""
    if trains and not plan.trains:
        raise PlanError(
            f"the plan must be for training; got one for inference; plan with --schedule {DEFAULT_SCHEDULE} and "
            "--batch-size, from a profile made with --training"
        )
    if not trains and plan.trains:
        raise PlanError(
            f"the plan must be for inference; got one for training (schedule {plan.schedule}); plan without "
            "--schedule, from a profile made without --training"
        )


def check_cuts(plan: Plan, cuts: Sequence[str]) -> None:
    """Raise `PlanError` unless the plan's cuts are among these names, in this order.

    Example:
        check_cuts(plan, profile.cuts)
    """
    positions = {name: index for index, name in enumerate(cuts)}
    for index, pipeline in enumerate(plan.pipelines):
        for number, cut_set in enumerate(pipeline.cut_sets):
            where = f"pipelines[{index}].cut_sets[{number}].cuts"
            for name in cut_set.cuts:
                if name not in positions:
                    _refuse(where, f"be made of cuts of {plan.model}", repr(name))
            for first, second in pairwise(cut_set.cuts):
                if positions[first] >= positions[second]:
                    _refuse(where, "be in the order of the model, each cut once", f"{first}, {second}")


def check_devices(plan: Plan, cluster: Cluster) -> None:
    """Raise `PlanError` unless every device of the plan is in the cluster."""
    known = {device.name for device in cluster.devices}
    for where, name in (("loader", plan.loader), ("writer", plan.writer), *_device_places(plan)):
        if name not in known:
            _refuse(where, f"be a device of {cluster.name}", repr(name))


def _check_schedule(plan: Plan) -> None:
    if not plan.trains:
        if plan.num_microbatches is not None:
            _refuse("num_microbatches", "be null for the schedule forward-only", plan.num_microbatches)
    elif plan.schedule not in SCHEDULES:
        _refuse("schedule", f"be one of forward-only, {', '.join(SCHEDULES)}", repr(plan.schedule)[:80])
    elif plan.num_microbatches is None or plan.num_microbatches < 1:
        _refuse("num_microbatches", f"be at least 1 for the schedule {plan.schedule}", plan.num_microbatches)
    for index, (pipeline, count) in enumerate(zip(plan.pipelines, plan.microbatches, strict=True)):
        if not plan.trains:
            break
        if count < 1 or not math.isclose(count, pipeline.share * (plan.num_microbatches or 0), abs_tol=_ROUNDING):
            whole = f"be a whole number of the {plan.num_microbatches} microbatches"
            _refuse(f"pipelines[{index}].share", whole, f"{pipeline.share:g}")
        if len(pipeline.cut_sets) > 1:
            _refuse(
                f"pipelines[{index}].cut_sets",
                f"have one cut set with the schedule {plan.schedule}",
                len(pipeline.cut_sets),
            )
    if not 0 <= plan.optimizer_state_factor < math.inf:
        _refuse("optimizer_state_factor", "be at least 0", plan.optimizer_state_factor)


def _check_devices_once(plan: Plan) -> None:
    """Check that each device holds one stage, or the interleaved stages of one pipeline."""
    interleaved = interleaves(plan.schedule)
    if interleaved and len(plan.pipelines) > 1:
        _refuse("pipelines", f"have one pipeline with the schedule {plan.schedule}", f"{len(plan.pipelines)}")
    names = [name for _, name in _device_places(plan)]
    for place, (where, name) in enumerate(_device_places(plan)):
        if interleaved and name != names[place % len(plan.devices)]:
            wanted = f"be the device of stage {place % len(plan.devices)}, since stages are assigned round-robin"
            _refuse(where, wanted, repr(name))
        if not interleaved and names.count(name) > 1:
            _refuse(where, "be a device that holds no other stage", repr(name))


def _check_pipeline(where: str, pipeline: PlannedPipeline) -> None:
    if not pipeline.stages:
        _refuse(f"{where}.stages", "have at least one stage", [])
    for index, stage in enumerate(pipeline.stages):
        _check_name(f"{where}.stages[{index}].device", stage.device)
        if not stage.runtime:
            wanted = "be the name of a runtime, such as eager"
            _refuse(f"{where}.stages[{index}].runtime", wanted, repr(stage.runtime))
    if not pipeline.cut_sets:
        _refuse(f"{where}.cut_sets", "have at least one cut set", [])
    _check_parts(f"{where}.cut_sets[*].weight", [cut_set.weight for cut_set in pipeline.cut_sets])
    for index, cut_set in enumerate(pipeline.cut_sets):
        place = f"{where}.cut_sets[{index}].cuts"
        if len(cut_set.cuts) != len(pipeline.stages) - 1:
            wanted = f"have {counted(len(pipeline.stages) - 1, 'cut')} for {counted(len(pipeline.stages), 'stage')}"
            _refuse(place, wanted, counted(len(cut_set.cuts), "cut"))
        if len(set(cut_set.cuts)) < len(cut_set.cuts):
            _refuse(place, "have each cut once", ", ".join(cut_set.cuts))
    sets = [cut_set.cuts for cut_set in pipeline.cut_sets]
    if len(set(sets)) < len(sets):
        _refuse(f"{where}.cut_sets", "have each cut set once", f"{len(sets)} of which {len(set(sets))} differ")


def _check_prediction(plan: Plan) -> None:
    prediction = plan.prediction
    for field in ("rows_per_s", "bound_rows_per_s", "total_s", "latency_s"):
        value = getattr(prediction, field)
        if not 0 < value < math.inf:
            _refuse(f"prediction.{field}", "be above 0", value)
    if prediction.num_rows < 1:
        _refuse("prediction.num_rows", "be at least 1", prediction.num_rows)
    predicted = [load.device for load in prediction.devices]
    for name in plan.devices:
        if predicted.count(name) != 1:
            _refuse("prediction.devices", "have each device of the plan once", f"{name} {predicted.count(name)} times")
    for index, load in enumerate(prediction.devices):
        for field in ("load_s", "memory_bytes"):
            if not 0 <= getattr(load, field) < math.inf:
                _refuse(f"prediction.devices[{index}].{field}", "be at least 0", getattr(load, field))


def _check_parts(where: str, parts: Sequence[float]) -> None:
    for part in parts:
        if not 0 < part <= 1 + _ROUNDING:
            _refuse(where, "be above 0 and at most 1", part)
    if not math.isclose(sum(parts), 1.0, abs_tol=_ROUNDING):
        _refuse(where, "add up to 1", f"{sum(parts):g}")


def _device_places(plan: Plan) -> Iterator[tuple[str, str]]:
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            yield f"pipelines[{index}].stages[{number}].device", stage.device


def _check_name(field: str, name: str) -> None:
    if not is_name(name):
        _refuse(field, NAME_RULE, repr(name)[:80])


def _refuse(field: str, rule: str, value: object) -> None:
    raise PlanError(f"{field} of a plan must {rule}; got {value}; correct it or replan")
