"""Memory that each stage of a plan needs, and the largest microbatches that fit a cluster."""

from dataclasses import dataclass, replace

import msgspec

from penstock.errors import PlanError
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import Choice, choose
from penstock.plan.cost.predict import divisions_of
from penstock.spec.cluster import Cluster, Device
from penstock.spec.profile import Profile

_MOST_ROWS = 2**16
_MOST_MACHINES = 64


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """Bytes that a device needs for its stage, and its memory.

    `training` are gradients, optimizer state, loaded rows and gradients that are being summed; `kept` activations or
    caches; `working` values while a unit runs; `process` the process with its libraries and its messages. With
    `recomputed`, activations are computed again in the backward, and the total is that.
    """

    device: str
    begin: str
    end: str
    weights: float
    training: float
    kept: float
    working: float
    process: float
    total: float
    recomputed: float | None
    memory: int


def stage_needs(choice: Choice, profile: Profile) -> list[StageNeeds]:
    """Return the needs of every stage of a plan with a stage for each device.

    Example:
        [(needs.device, needs.total) for needs in stage_needs(choose(profile, cluster, request), profile)]
    """
    problem = choice.best.problem
    costs = problem.costs
    found = []
    for pipeline in choice.best.pipelines:
        (division, *_) = divisions_of(problem, pipeline)
        for placed, in_flight in zip(division, problem.in_flight(division), strict=True):
            at = (placed.start, placed.end)
            weights = float(costs.parameter_bytes[at] + costs.fixed_bytes[at])
            working, held = float(costs.working_bytes[at]), float(costs.held_bytes[at])
            kept_of_one = float(costs.kept_at_end_bytes[placed.end] - costs.kept_bytes[placed.start])
            total = problem.memory_bytes(placed.device, *at, in_flight)
            # a stage that recomputes keeps its inputs, and the activations of the microbatch that runs backward
            inputs = float(costs.crossing[placed.start])
            less = kept_of_one * in_flight - (kept_of_one + inputs * in_flight)
            device, boundaries = problem.devices[placed.device], profile.boundaries
            found.append(StageNeeds(
                device=device.name, begin=boundaries[placed.start].name, end=boundaries[placed.end].name,
                weights=weights, training=held - weights - working, kept=kept_of_one * in_flight, working=working,
                process=total - held - kept_of_one * in_flight, total=total,
                recomputed=total - max(0.0, less) if problem.setting.trains else None, memory=device.memory_bytes,
            ))  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class Fit:
    """The most rows of a microbatch, or slots of a lane, that fit a cluster (0: none), and for `rows` rows the stages'
    needs and the rate, or the reason why they do not fit.

    `more` machines like the largest would make them fit (0: none known), or one more has room for `most_with_more` rows
    and runs them `faster` times as fast.
    """

    rows: int
    most_rows: int
    stages: list[StageNeeds]
    rows_per_s: float
    reason: str
    like: str
    more: int
    most_with_more: int
    faster: float


def fit(profile: Profile, cluster: Cluster, request: PlanRequest, rows: int | None = None) -> Fit:
    """Find whether a number of rows fits a cluster, by default the most that fit.

    Example:
        fit(counted_profile(graph, 1), cluster, PlanRequest(replicas=False)).most_rows
    """
    like = max(cluster.devices, key=lambda device: (device.memory_bytes, device.speed))
    larger = with_one_more(cluster, like)
    most = _most_rows(profile, cluster, request)
    rows = rows or max(1, most)
    try:
        choice = choose(profile, cluster, replace(request, rows=(rows,)))
    except PlanError as error:
        more = _machines_that_do(profile, cluster, replace(request, rows=(rows,)), like)
        return Fit(rows, most, [], 0.0, str(error), like.name, more, 0, 0.0)
    rate = choice.plan.prediction.rows_per_s
    faster = choose(profile, larger, replace(request, rows=(rows,))).plan.prediction.rows_per_s / rate
    needs, more = stage_needs(choice, profile), _most_rows(profile, larger, request, most)
    return Fit(rows, most, needs, rate, "", like.name, 0, more, faster)


def _most_rows(profile: Profile, cluster: Cluster, request: PlanRequest, known: int = 1) -> int:
    """Return the most rows that fit, if `known` rows do; 0 if they do not."""

    def fits(rows: int) -> bool:
        return rows <= _MOST_ROWS and _fits(profile, cluster, replace(request, rows=(rows,)))

    if not fits(max(1, known)):
        return 0
    low = max(1, known)
    while fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _machines_that_do(profile: Profile, cluster: Cluster, request: PlanRequest, like: Device) -> int:
    for more in range(1, _MOST_MACHINES + 1):
        cluster = with_one_more(cluster, like)
        if _fits(profile, cluster, request):
            return more
    return 0


def _fits(profile: Profile, cluster: Cluster, request: PlanRequest) -> bool:
    try:
        choose(profile, cluster, request)
    except PlanError:
        return False
    return True


def with_one_more(cluster: Cluster, like: Device) -> Cluster:
    """Return the cluster with one device more; the driver stays."""
    names = {device.name for device in cluster.devices}
    name = next(f"{like.name}+{number}" for number in range(1, len(names) + 2) if f"{like.name}+{number}" not in names)
    more = msgspec.structs.replace(like, name=name, address="")
    # keep the driver, even if it is the first device only by default
    return msgspec.structs.replace(cluster, devices=(*cluster.devices, more), feeder=cluster.feeding.name)
