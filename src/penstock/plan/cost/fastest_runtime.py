"""Which runtime each device's stages compute on: the fastest that it has whose outputs are near enough to eager's."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from penstock.errors import PlanError
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Pipeline, Plan, Stage
from penstock.spec.profile import Profile, RuntimeColumn

# by the names of devices; stages of one that is not there compute eagerly
Columns = Mapping[str, RuntimeColumn]


def columns_within(profile: Profile, cluster: Cluster, max_error: float, *, alike: bool = False) -> Columns:
    """Return for each device the fastest runtime that it has, of those whose outputs are at most so far from eager's.

    A device for which eager is fastest is left out. With `alike` only runtimes that all devices have are looked at.

    Example:
        columns_within(profile, cluster, 0.02)["board2"].name

    Raises `PlanError` for a profile that has no other runtime, and a device with one that was not measured.
    """
    if not profile.runtimes:
        raise PlanError("the profile has no other runtime than eager; profile again with --runtime NAME")
    known = [column.name for column in profile.runtimes]
    everywhere: set[str] = set(known)
    for device in cluster.devices:
        names = known if device.runtimes is None else device.runtimes
        if unknown := sorted(set(names) - {*known, "eager"}):
            raise PlanError(
                f"{device.name} has the runtime {unknown[0]}, of which the profile says nothing; profile again with "
                f"--runtime {unknown[0]}, or leave it out of the cluster file"
            )
        everywhere &= set(names)
    found = {}
    for device in cluster.devices:
        own = everywhere if alike else set(known if device.runtimes is None else device.runtimes)
        fastest = _fastest(profile, max_error, own)
        if fastest is not None:
            found[device.name] = fastest
    return found


def columns_of(plan: Plan, profile: Profile) -> Columns | None:
    """Return what a profile knows of the runtimes of a plan's devices; None where it does not know one of them."""
    found: dict[str, RuntimeColumn] = {}
    by_use = {(column.runtime, column.precision, column.keep): column for column in profile.runtimes}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        use = stage.runtime, stage.precision, stage.keep
        if use == ("eager", "float32", ()):
            continue
        if use not in by_use:
            return None
        found |= dict.fromkeys(stage.devices, by_use[use])
    return found


def computed_on(pipelines: Sequence[Pipeline], columns: Columns) -> tuple[Pipeline, ...]:
    """Return pipelines whose stages compute on the runtimes of their devices."""
    return _with_stages(pipelines, [[columns.get(stage.devices[0]) for stage in each.stages] for each in pipelines])


def computed_like(pipelines: Sequence[Pipeline], like: Stage) -> tuple[Pipeline, ...]:
    """Return pipelines whose stages compute as another stage does."""
    return _with_stages(pipelines, [[like] * len(each.stages) for each in pipelines])


def factor_at(profile: Profile, column: RuntimeColumn | None, rows: int) -> float:
    """Return how much less a unit takes on a runtime, for microbatches of some rows: as much less as the whole model.

    What a unit alone takes there is not known: such runtimes join operations beyond the edges of units.
    """
    if column is None:
        return 1.0
    factors = [fast / eager for fast, eager in zip(column.forward_s, column.eager_s, strict=True)]
    place = sum(measured <= rows for measured in profile.rows)
    if place == 0 or place == len(factors):
        return factors[max(place - 1, 0)]
    left, right = profile.rows[place - 1], profile.rows[place]
    part = (rows - left) / (right - left)
    return factors[place - 1] * (1 - part) + factors[place] * part


def _fastest(profile: Profile, max_error: float, names: Collection[str]) -> RuntimeColumn | None:
    near = [
        column for column in profile.runtimes
        if column.name in names and column.error <= max_error and _mean_factor(column) < 1.0
    ]  # fmt: skip
    return min(near, key=_mean_factor, default=None)


def _mean_factor(column: RuntimeColumn) -> float:
    return sum(fast / eager for fast, eager in zip(column.forward_s, column.eager_s, strict=True)) / len(column.eager_s)


def _with_stages(
    pipelines: Sequence[Pipeline], likes: Sequence[Sequence[RuntimeColumn | Stage | None]]
) -> tuple[Pipeline, ...]:  # fmt: skip
    made = []
    for pipeline, own in zip(pipelines, likes, strict=True):
        stages = tuple(
            stage if like is None
            else msgspec.structs.replace(stage, runtime=like.runtime, precision=like.precision, keep=like.keep)
            for stage, like in zip(pipeline.stages, own, strict=True)
        )  # fmt: skip
        made.append(msgspec.structs.replace(pipeline, stages=stages))
    return tuple(made)
