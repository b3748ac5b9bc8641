"""Costs of a model with frozen leading layers: no backward, no kept activations; if cached, no computation."""

from collections.abc import Collection, Sequence
from itertools import pairwise

import msgspec

from penstock.errors import PlanError
from penstock.spec.plan import CutSet, Plan, PlannedPipeline
from penstock.spec.profile import Boundary, Profile, Unit


def freeze(profile: Profile, boundary: str) -> Profile:
    """Return a profile whose units before a boundary only run forward, keep no activations and are not updated.

    Example:
        freeze(profile, "blocks.3:after")

    Raises `PlanError` if the profile lacks the boundary.
    """
    end = place_of(profile, boundary)
    units = [_frozen(unit) if index < end else unit for index, unit in enumerate(profile.units)]
    boundaries = [
        msgspec.structs.replace(each, gradient=each.gradient and not 0 < index <= end)
        for index, each in enumerate(profile.boundaries)
    ]
    return msgspec.structs.replace(profile, units=tuple(units), boundaries=tuple(boundaries))


def cache(profile: Profile, boundary: str, read_s_per_row: float = 0.0) -> Profile:
    """Return a profile of a model that starts at a boundary: the part before it is cached, and only takes memory.

    The units before the boundary, which must be frozen, are merged into the unit after it, so that no plan cuts there.
    Reading a row takes `read_s_per_row`. Raises `PlanError` if the profile lacks the boundary.
    """
    end = place_of(profile, boundary)
    skipped, first = profile.units[:end], profile.units[end]
    reading = tuple(
        seconds + rows * read_s_per_row for rows, seconds in zip(profile.rows, first.forward_s, strict=True)
    )
    start = msgspec.structs.replace(
        first, forward_s=reading, fixed_bytes=first.fixed_bytes + sum(unit.fixed_bytes for unit in skipped)
    )
    given = msgspec.structs.replace(
        profile.boundaries[end], name=profile.boundaries[0].name, gradient=profile.boundaries[0].gradient
    )
    return msgspec.structs.replace(
        profile, units=(start, *profile.units[end + 1 :]), boundaries=(given, *profile.boundaries[end + 1 :])
    )


def keep_cuts(profile: Profile, names: Collection[str]) -> Profile:
    """Return a profile with only these cuts; the units between them are merged.

    Example:
        keep_cuts(profile, {"blocks.3:after", "blocks.7:after"})
    """
    kept = [
        index for index, each in enumerate(profile.boundaries) if index in {0, len(profile.units)} or each.name in names
    ]
    units = [_joined(profile.units[start:end]) for start, end in pairwise(kept)]
    boundaries: list[Boundary] = [profile.boundaries[index] for index in kept]
    return msgspec.structs.replace(profile, units=tuple(units), boundaries=tuple(boundaries))


def without_cuts(plan: Plan, known: Collection[str]) -> Plan:
    """Return a plan without the leading cuts that no longer exist, whose stages no longer run.

    `known` are the remaining cuts, which are the last cuts of the plan.
    """
    pipelines = []
    for pipeline in plan.pipelines:
        gone = sum(name not in known for name in pipeline.cut_sets[0].cuts)
        cut_sets = (CutSet(cuts=each.cuts[gone:], weight=each.weight) for each in pipeline.cut_sets)
        pipelines.append(PlannedPipeline(stages=pipeline.stages[gone:], cut_sets=tuple(cut_sets), share=pipeline.share))
    return msgspec.structs.replace(plan, pipelines=tuple(pipelines))


def place_of(profile: Profile, boundary: str) -> int:
    """Return the number of a boundary; raises `PlanError` if none has this name."""
    names = [each.name for each in profile.boundaries]
    if boundary not in names[1:-1]:
        raise PlanError(
            f"cut {boundary!r} not found in the profile, so layers before it cannot be frozen; profile this model again"
        )
    return names.index(boundary)


def _frozen(unit: Unit) -> Unit:
    zero = tuple(0.0 for _ in unit.forward_s)
    return msgspec.structs.replace(
        unit,
        backward_s=zero,
        backward_spread_s=(),
        parameters=(),
        kept_bytes_per_row=0.0,
        fixed_bytes=unit.fixed_bytes + sum(dict(unit.parameters).values()),
    )


def _joined(units: Sequence[Unit]) -> Unit:
    if len(units) == 1:
        return units[0]
    backward = [unit.backward_s for unit in units]
    return Unit(
        forward_s=_sums([unit.forward_s for unit in units]),
        backward_s=_sums([each for each in backward if each is not None]) if None not in backward else None,
        parameters=tuple(dict(pair for unit in units for pair in unit.parameters).items()),
        fixed_bytes=sum(unit.fixed_bytes for unit in units),
        kept_bytes_per_row=sum(unit.kept_bytes_per_row for unit in units),
        working_bytes_per_row=max(unit.working_bytes_per_row for unit in units),
        working_bytes=max(unit.working_bytes for unit in units),
    )


def _sums(tables: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(column) for column in zip(*tables, strict=True))
