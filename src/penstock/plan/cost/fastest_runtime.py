"""Choice of each device's runtime: the fastest available runtime whose outputs are close enough to eager's."""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean

import msgspec
import numpy as np

from penstock.errors import PlanError
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan, PlannedPipeline, PlannedStage, runtime_name
from penstock.spec.profile import Profile, RuntimeColumn

# by device name; other devices use eager
Columns = Mapping[str, RuntimeColumn]
_EAGER = "eager"


def columns_within(profile: Profile, cluster: Cluster, max_error: float) -> Columns:
    """Return each device's fastest runtime with a relative output error of at most `max_error`.

    Devices for which eager is fastest are left out.

    Example:
        columns_within(profile, cluster, 0.02)["board2"].name

    Raises `PlanError` if the profile has no other runtimes, or if a device has a runtime that was not measured.
    """
    if not profile.runtimes:
        raise PlanError("the profile has no runtime other than eager; profile again with --runtime NAME")
    known = {column.name for column in profile.runtimes}
    has = {device.name: known if device.runtimes is None else set(device.runtimes) for device in cluster.devices}
    for name, names in has.items():
        if unknown := sorted(names - known - {_EAGER}):
            raise PlanError(
                f"{name} has the runtime {unknown[0]}, which was not found in the profile; profile again with "
                f"--runtime {unknown[0]}, or leave it out of the cluster file"
            )
    found = {name: _fastest(profile, max_error, names) for name, names in has.items()}
    return {name: column for name, column in found.items() if column is not None}


def columns_of(plan: Plan, profile: Profile) -> Columns | None:
    """Return a profile's columns for the runtimes of a plan's devices; None if a column is missing."""
    known = {column.name: column for column in profile.runtimes}
    found: dict[str, RuntimeColumn] = {}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        name = runtime_name(stage.runtime, stage.precision, stage.keep)
        if name == _EAGER:
            continue
        if name not in known:
            return None
        found[stage.device] = known[name]
    return found


def computed_on(pipelines: Sequence[PlannedPipeline], columns: Columns) -> tuple[PlannedPipeline, ...]:
    """Return pipelines with each stage's runtime set to the runtime of its device."""
    return _with_runtimes(pipelines, lambda stage: columns.get(stage.device, stage))


def computed_like(pipelines: Sequence[PlannedPipeline], like: PlannedStage) -> tuple[PlannedPipeline, ...]:
    """Return pipelines with each stage's runtime set to the runtime of `like`."""
    return _with_runtimes(pipelines, lambda _stage: like)


def factor_at(profile: Profile, column: RuntimeColumn | None, rows: int) -> float:
    """Return the ratio of a runtime's time to eager's, for microbatches of n rows.

    It is the ratio for the whole model, because times of single units are not known: these runtimes fuse operations
    across the edges of units.
    """
    return 1.0 if column is None else float(np.interp(rows, profile.rows, _factors(column)))


def _fastest(profile: Profile, max_error: float, names: Collection[str]) -> RuntimeColumn | None:
    near = [
        column
        for column in profile.runtimes
        if column.name in names and column.error <= max_error and fmean(_factors(column)) < 1.0
    ]
    return min(near, key=lambda column: fmean(_factors(column)), default=None)


def _factors(column: RuntimeColumn) -> list[float]:
    return [fast / eager for fast, eager in zip(column.forward_s, column.eager_s, strict=True)]


def _with_runtimes(
    pipelines: Sequence[PlannedPipeline], like_of: Callable[[PlannedStage], RuntimeColumn | PlannedStage]
) -> tuple[PlannedPipeline, ...]:
    def changed(stage: PlannedStage) -> PlannedStage:
        like = like_of(stage)
        return msgspec.structs.replace(stage, runtime=like.runtime, precision=like.precision, keep=like.keep)

    return tuple(
        msgspec.structs.replace(pipeline, stages=tuple(map(changed, pipeline.stages))) for pipeline in pipelines
    )
