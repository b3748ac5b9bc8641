"""Choice of a plan: ranking of candidates, explanation if none fits, and replanning."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from penstock.errors import PlanError
from penstock.plan.candidates import EQUAL, Candidate, PlanRequest, candidates_of, fits, with_rotation
from penstock.plan.check import check_plan
from penstock.plan.cost.frozen import without_cuts
from penstock.plan.cost.predict import predict
from penstock.plan.cost.problem import Problem
from penstock.plan.cost.stage_cost import Vector, columns_of, columns_within, computed_on, counted_columns
from penstock.plan.schedule.schedules import DEFAULT_SCHEDULE
from penstock.spec.cluster import Cluster, Device
from penstock.spec.fields import fingerprint
from penstock.spec.plan import Generation, Plan
from penstock.spec.profile import Profile
from penstock.units import format_bytes

# number of pipelines, in addition to the best, that are tried with rotating cuts
_ROTATED = 3
# memory of an unknown device: unlimited
_ENOUGH_BYTES = 2**50


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen plan, as plan and as candidate, and the other candidates, best first."""

    plan: Plan
    best: Candidate
    others: tuple[Candidate, ...]


def make_plan(profile: Profile, cluster: Cluster, request: PlanRequest | None = None) -> Plan:
    """Choose stages, devices, cut sets, replicas and microbatch size for a model on a cluster.

    Example:
        plan = make_plan(read_profile("profile.json"), read_cluster("cluster.toml"))

    Raises `PlanError` if no plan fits, naming the missing and a sufficient memory, or if none reaches the target.
    """
    return choose(profile, cluster, request or PlanRequest()).plan


def choose(profile: Profile, cluster: Cluster, request: PlanRequest) -> Choice:
    """Choose a plan, and keep the other candidates; see `make_plan`."""
    if profile.generation is not None:
        # stages keep caches, so all microbatches must take the same route
        if request.schedule != "forward-only":
            raise PlanError(
                f"training with {request.schedule} needs another profile than of generation; use profile --training"
            )
        request = replace(request, replicas=False, alternate=False)
    candidates: list[Candidate] = []
    limit = request.max_error
    columns = counted_columns(profile, cluster) if limit is None else columns_within(profile, cluster, limit)
    problems = [Problem(profile, cluster, setting, columns) for setting in request.settings(profile)]
    for problem in problems:
        candidates += candidates_of(problem, request)
    if not candidates:
        raise PlanError(explain_misfit(problems[0]))
    ranked = rank(candidates, request)
    best = ranked[0]
    if request.alternate and request.aim == "throughput":
        rotating = [found for plain in _worth_rotating(ranked) if (found := with_rotation(plain, request)) is not None]
        fastest = max(rotating, key=lambda c: c.prediction.rows_per_s, default=best)
        if fastest.prediction.rows_per_s > best.prediction.rows_per_s * (1 + EQUAL):
            ranked, best = [fastest, *ranked], fastest
    plan = write_down(best, profile, cluster, request)
    return Choice(plan=plan, best=best, others=tuple(ranked[1:]))


def rank(candidates: Sequence[Candidate], request: PlanRequest) -> list[Candidate]:
    """Order candidates by the request's aim; raises `PlanError` if none reaches the target."""
    if request.aim == "latency":
        return sorted(candidates, key=lambda c: (c.prediction.latency_s, c.num_devices))
    target = request.target_rows_per_s
    if request.aim == "devices" and target is not None:
        fast = [c for c in candidates if c.prediction.rows_per_s >= target * (1 - 1e-9)]
        if not fast:
            most = max(candidates, key=lambda c: c.prediction.rows_per_s)
            raise PlanError(
                f"no plan reaches {target:g} rows/s: the best found has {most.prediction.rows_per_s:.4g} rows/s with "
                f"{most.num_devices} devices; use a smaller --target or more devices"
            )
        return sorted(fast, key=lambda c: (c.num_devices, -c.prediction.rows_per_s, c.prediction.latency_s))
    top = max(c.prediction.rows_per_s for c in candidates)
    return sorted(candidates, key=lambda c: _by_throughput(c, top))


def write_down(candidate: Candidate, profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """Convert a candidate to a plan."""
    feeder = cluster.feeding.name
    plan = Plan(
        model=profile.model, graph=profile.graph, profile=fingerprint(profile), cluster=fingerprint(cluster),
        microbatch_rows=candidate.rows, loader=feeder, writer=feeder,
        pipelines=computed_on(candidate.pipelines, candidate.problem.columns),
        prediction=candidate.prediction, schedule=request.schedule, depth=request.depth,
        num_microbatches=candidate.problem.setting.num_microbatches,
        optimizer_state_factor=request.optimizer_state_factor, generation=_caches(candidate, profile),
    )  # fmt: skip
    check_plan(plan)
    return plan


def _caches(candidate: Candidate, profile: Profile) -> Generation | None:
    if profile.generation is None:
        return None
    lanes = candidate.problem.setting.lanes_of(len(candidate.pipelines[0].stages))
    return msgspec.structs.replace(profile.generation, slots=candidate.rows, lanes=lanes)


def _worth_rotating(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return the pipelines that may gain most from rotation: the best, and those of its size with the most devices."""
    plain = [c for c in ranked if c.kind == "stages"]
    if not plain:
        return []
    alike = [c for c in plain if c.rows == plain[0].rows and c is not plain[0]]
    return [plain[0], *sorted(alike, key=lambda c: -c.num_devices)[:_ROTATED]]


def _by_throughput(candidate: Candidate, top: float) -> tuple[float, float, float, float]:
    rate = candidate.prediction.rows_per_s
    if rate >= top * (1 - EQUAL):
        return (0.0, candidate.num_devices, -rate, candidate.prediction.latency_s)
    return (1.0, -rate, candidate.num_devices, candidate.prediction.latency_s)


def explain_misfit(problem: Problem) -> str:
    """Return a one-line explanation with the missing memory and a sufficient memory per device.

    Example:
        raise PlanError(explain_misfit(problem))
    """
    devices = problem.devices
    largest = max(range(len(devices)), key=lambda number: devices[number].memory_bytes)
    need, unit = _neediest_unit(problem, largest)
    have = devices[largest].memory_bytes
    each = memory_that_would_do(problem)
    would = f"{format_bytes(_round_up(each))} on each of {len(devices)} devices would suffice"
    if need > have:
        names = [boundary.name for boundary in problem.profile.boundaries]
        return (
            f"the unit between {names[unit]} and {names[unit + 1]} alone needs {format_bytes(need)}, but the "
            f"largest memory is {format_bytes(have)} on {devices[largest].name}, {format_bytes(need - have)} too "
            f"little; {would}"
        )
    tightest = min(range(len(devices)), key=lambda number: devices[number].memory_bytes)
    missing = each - devices[tightest].memory_bytes
    total = float(problem.costs.held_bytes[0, problem.num_units])
    holds = ", with gradients and optimizer state," if problem.setting.trains else ""
    if problem.setting.generates:
        total += float(problem.costs.kept_bytes[-1]) * problem.setting.in_flight(1)
        holds = " with its caches"
    saves = problem.setting.trains and problem.setting.schedule != DEFAULT_SCHEDULE
    fewer = f", or the schedule {DEFAULT_SCHEDULE}, which keeps fewer microbatches" if saves else ""
    have_all = sum(device.memory_bytes for device in devices)
    return (
        f"the model does not fit: it needs {format_bytes(total)}{holds} and the base memory of every process; the "
        f"devices have {format_bytes(have_all)} in total; {devices[tightest].name} has "
        f"{format_bytes(devices[tightest].memory_bytes)}, {format_bytes(max(missing, 0.0))} less than an equal share; "
        f"{would}, or use more devices or fewer rows per microbatch{fewer}"
    )


def memory_that_would_do(problem: Problem) -> float:
    """Return the smallest memory per device with which as many equal devices could hold the model."""
    if problem.setting.generates:
        problem = problem.for_stages(len(problem.devices))
    best = np.where(np.arange(problem.num_units + 1) == problem.num_units, 0.0, np.inf)
    least = np.inf
    for from_end in range(1, min(len(problem.devices), problem.num_units) + 1):
        best = np.maximum(_needs(problem, from_end), best).min(axis=1)
        least = min(least, float(best[0]))
    return least


def _needs(problem: Problem, from_end: int) -> Vector:
    """Return the memory of every possible stage on the driver, which needs the most; infinite for empty stages."""
    need = problem.memory_block(problem.feeder, problem.setting.in_flight(from_end), slice(None), slice(None))
    need[np.tril_indices(problem.num_units + 1)] = np.inf
    return need


def _neediest_unit(problem: Problem, number: int) -> tuple[float, int]:
    needs = [problem.memory_bytes(number, u, u + 1, problem.setting.in_flight(1)) for u in range(problem.num_units)]
    return max(needs), needs.index(max(needs))


def _round_up(num_bytes: float) -> float:
    """Round up to three digits, so that the printed number is sufficient."""
    step = 10.0 ** max(0, len(str(int(num_bytes))) - 3)
    return float(np.ceil(num_bytes / step) * step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """Cost of switching to another plan, and the number of rows that will use it.

    >>> Moving(cost_s=2.0, remaining_rows=1000.0).pays(100.0, 150.0)
    True
    """

    cost_s: float
    remaining_rows: float

    def pays(self, rows_per_s: float, fresh_rows_per_s: float) -> bool:
        """Return True if the remaining rows take less time with the migration than without it."""
        return self.cost_s + self.remaining_rows / fresh_rows_per_s < self.remaining_rows / rows_per_s


def plan_again(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    speeds: Mapping[str, float] | None = None,
    missing: Collection[str] = (),
    worth: float = 0.02,
    moving: Moving | None = None,
    replicas: bool = True,
    alternate: bool | None = None,
) -> Plan:
    """Return a plan for the cluster's current state; if it gains too little, the old plan with new predictions.

    `speeds` are observed speeds of devices, as multiples of the profiled device's speed; `missing` are lost devices; a
    new device must already be in the cluster. A new plan must be faster by more than `worth` (0.02 is 2%), since a
    change migrates weights, and with `moving` it must save more time than the migration takes. Microbatch size, depth
    and schedule do not change; without `replicas` the search is limited to one pipeline, and with `alternate=False` to
    one cut set. For training with frozen leading layers, pass a frozen profile (`plan/cost/frozen.py`).

    Example:
        plan = plan_again(plan, profile, cluster, speeds={"board2": 0.2}, missing={"board3"})

    A pure function. Raises `PlanError` if no plan fits or the driver is lost, `ClusterError` for names that are not in
    the cluster.
    """
    now = observed(cluster, speeds or {}, missing)
    errors = [column.error for column in (columns_of(plan, profile) or {}).values()]
    request = replace(request_of(plan), replicas=replicas, max_error=max(errors, default=None))
    if alternate is not None:
        request = replace(request, alternate=alternate)
    kept = None
    if not set(plan.devices) & set(missing):
        stays = msgspec.structs.replace(
            without_cuts(plan, profile.cuts), loader=now.feeding.name, writer=now.feeding.name
        )
        kept = predict(stays, profile, now)
    fresh = make_plan(profile, now, request)
    if kept is None or not fits(kept.prediction, now):
        return fresh
    rates = kept.prediction.rows_per_s, fresh.prediction.rows_per_s
    if rates[1] > rates[0] * (1 + worth) and (moving is None or moving.pays(*rates)):
        return fresh
    return msgspec.structs.replace(kept, profile=fresh.profile, cluster=fresh.cluster)


def observed(cluster: Cluster, speeds: Mapping[str, float], missing: Collection[str]) -> Cluster:
    """Return the cluster in its observed state.

    Example:
        observed(cluster, {"board2": 0.2}, {"board3"})

    Raises `ClusterError` for unknown names, `PlanError` if the driver is lost.
    """
    for name in (*speeds, *missing):
        cluster.device(name)
    feeder = cluster.feeding.name
    if feeder in missing:
        raise PlanError(f"the driver {feeder} is lost; set another feeder in the cluster file and start again there")
    return msgspec.structs.replace(cluster.at_speeds(speeds), feeder=feeder).without(missing)


def cluster_among(known: Cluster | None, names: Sequence[str], *, feeder: str, speed: float = 1.0) -> Cluster:
    """Return the cluster of these devices; an unknown device is assumed to have `speed` and unlimited memory.

    >>> cluster_among(None, ["desk", "board"], feeder="desk").device("board").speed
    1.0
    """
    of_name = {device.name: device for device in known.devices} if known is not None else {}
    devices = tuple(of_name.get(name) or Device(name=name, speed=speed, memory_bytes=_ENOUGH_BYTES) for name in names)
    if known is None:
        return Cluster(devices=devices, feeder=feeder)
    links = tuple(link for link in known.links if set(link.between) <= set(names))
    return msgspec.structs.replace(known, devices=devices, links=links, feeder=feeder)


def request_of(plan: Plan) -> PlanRequest:
    """Return a request for a plan with the same microbatches, depth and schedule."""
    return PlanRequest(
        rows=(plan.microbatch_rows,),
        num_rows=plan.prediction.num_rows,
        depth=plan.depth,
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        optimizer_state_factor=plan.optimizer_state_factor,
        alternate=plan.schedule == "forward-only",
        lanes=plan.generation.lanes if plan.generation else None,
    )
