"""Which runtime a plan's stages compute on: the fastest whose outputs are near enough to eager's."""

from collections.abc import Sequence

import msgspec

from penstock.errors import PlanError
from penstock.spec.plan import Pipeline, Plan, Stage
from penstock.spec.profile import Profile, RuntimeColumn


def fastest_within(profile: Profile, max_error: float) -> RuntimeColumn | None:
    """Return the fastest runtime of a profile that is at most so far from eager's outputs; None where eager is.

    Example:
        fastest_within(profile, 0.02)

    Raises `PlanError` for a profile that has no other runtime.
    """
    if not profile.runtimes:
        raise PlanError("the profile has no other runtime than eager; profile again with --runtime NAME")
    near = [column for column in profile.runtimes if column.error <= max_error and _factor(column) < 1.0]
    return min(near, key=_factor, default=None)


def column_of(plan: Plan, profile: Profile) -> RuntimeColumn | None:
    """Return what a profile knows of a plan's runtime; None where it is eager, unknown, or differs between stages."""
    used = {(stage.runtime, stage.precision, stage.keep) for pipeline in plan.pipelines for stage in pipeline.stages}
    columns = (column for column in profile.runtimes if {(column.runtime, column.precision, column.keep)} == used)
    return next(columns, None)


def computed_on(pipelines: Sequence[Pipeline], like: RuntimeColumn | Stage | None) -> tuple[Pipeline, ...]:
    """Return pipelines whose stages compute on the runtime of a profile's column, or as another stage does."""
    if like is None:
        return tuple(pipelines)
    return tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(
                msgspec.structs.replace(stage, runtime=like.runtime, precision=like.precision, keep=like.keep)
                for stage in pipeline.stages
            ),
        )
        for pipeline in pipelines
    )


def _factor(column: RuntimeColumn) -> float:
    return sum(fast / eager for fast, eager in zip(column.forward_s, column.eager_s, strict=True)) / len(column.eager_s)
