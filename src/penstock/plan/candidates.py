"""Requirements of a plan, and candidate plans with predictions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import PlanError
from penstock.plan.cost.predict import predict_pipelines
from penstock.plan.cost.problem import Division, Problem, bottleneck_bound_s, bottleneck_s
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.schedule.schedules import DEFAULT_SCHEDULE, interleaves
from penstock.plan.search.exact import best_divisions
from penstock.plan.search.large import good_division, refine
from penstock.plan.search.partition import interleaved_divisions
from penstock.plan.search.replicas import best_replicas, best_steps, rates_of
from penstock.plan.search.rotation import rotated
from penstock.spec.cluster import Cluster
from penstock.spec.plan import CutSet, PlannedPipeline, PlannedStage, Prediction
from penstock.spec.profile import Profile

PlanAim = Literal["throughput", "latency", "devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Requirements of a plan.

    `aim` is throughput, latency or the fewest devices for `target_rows_per_s`. `rows` are the microbatch sizes to
    choose from, by default the profile's sizes. `num_rows` is the length of the predicted stream. `replicas` allows
    parallel pipelines. A training step has `num_microbatches` microbatches, or as many as make up `batch_rows`, over
    all replicas. `recording_bytes` are kept free on every device for a trace. With `max_error`, a stage uses the
    fastest runtime of its device whose outputs have at most this relative error compared with eager. A model that
    generates has `lanes`, by default as many as its stages need.

    >>> PlanRequest(aim="latency").depth
    2
    """

    aim: PlanAim = "throughput"
    target_rows_per_s: float | None = None
    rows: tuple[int, ...] = ()
    num_rows: int = 500
    depth: int = 2
    schedule: str = "forward-only"
    num_microbatches: int | None = None
    batch_rows: int | None = None
    optimizer_state_factor: float = 0.0
    alternate: bool = True
    replicas: bool = True
    recording_bytes: float = 0.0
    max_error: float | None = None
    lanes: int | None = None

    def __post_init__(self) -> None:
        if self.max_error is not None and self.schedule != "forward-only":
            raise PlanError("only the eager runtime can train; leave --max-error out")
        if self.aim == "devices" and not (self.target_rows_per_s and self.target_rows_per_s > 0):
            raise PlanError("the aim devices needs a target throughput; give --target in rows per second")
        if self.schedule == "forward-only":
            if self.num_microbatches is not None or self.batch_rows is not None:
                raise PlanError(
                    f"the size of a step is for training; add --schedule {DEFAULT_SCHEDULE} or another schedule"
                )
        elif (self.num_microbatches is None) == (self.batch_rows is None):
            raise PlanError(
                f"the schedule {self.schedule} needs the size of a step; give one of --batch-size and --microbatches"
            )

    def settings(self, profile: Profile) -> list[Setting]:
        """Return a setting for each microbatch size, by default for the measured sizes.

        Raises `PlanError` if no size divides the batch.
        """
        sizes = self.rows or profile.rows
        batch = self.batch_rows
        fitting = [rows for rows in sizes if batch is None or batch % rows == 0]
        if not fitting:
            raise PlanError(
                f"microbatches must divide the batch of {batch} rows; got {', '.join(map(str, sizes))} rows; give "
                "other --rows"
            )
        return [self._setting(rows, generates=profile.generation is not None) for rows in fitting]

    def _setting(self, rows: int, *, generates: bool) -> Setting:
        count = self.num_microbatches if self.batch_rows is None else self.batch_rows // rows
        return Setting(
            rows=rows,
            depth=self.depth,
            schedule=self.schedule,
            num_microbatches=count,
            optimizer_state_factor=self.optimizer_state_factor,
            recording_bytes=self.recording_bytes,
            generates=generates,
            lanes=self.lanes,
        )


Kind = Literal["stages", "replicas", "rotating cuts"]
# plans within this relative difference count as equal: then fewer devices are better
EQUAL = 1e-3
_BOUNDED_EFFORT = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate plan: its kind, its pipelines with names of devices and cuts, and their prediction.

    `exact` is set if no plan of this kind is better for this microbatch size.
    """

    kind: Kind
    problem: Problem
    pipelines: tuple[PlannedPipeline, ...]
    prediction: Prediction
    exact: bool

    @property
    def num_devices(self) -> int:
        """Number of devices that hold stages."""
        return len({stage.device for pipeline in self.pipelines for stage in pipeline.stages})

    @property
    def rows(self) -> int:
        """Rows per microbatch."""
        return self.problem.setting.rows


def candidates_of(problem: Problem, request: PlanRequest) -> list[Candidate]:
    """Return the plans worth comparing for one microbatch size.

    These are the best pipeline for each number of devices, and parallel pipelines.
    """
    if interleaves(problem.setting.schedule):
        return _interleaved(problem, request)
    found = _single(problem, request)
    if request.replicas and request.aim != "latency" and len(problem.devices) > 1:
        found += _replicas(problem, request)
    if problem.setting.trains or problem.setting.generates:
        # with very many devices the search did not know the number of stages, on which memory may depend
        found = [candidate for candidate in found if fits(candidate.prediction, problem.cluster)]
    return found


def as_candidate(
    problem: Problem, kind: Kind, divisions: Sequence[tuple[float, Division]], request: PlanRequest, *, exact: bool
) -> Candidate:
    """Return pipelines as a candidate: with names, shares of the microbatches, and a prediction."""
    pipelines = tuple(_pipeline(problem, division, share) for share, division in divisions)
    pace = bottleneck_s(problem, divisions[0][1])
    exact = exact and not problem.setting.trains  # the search minimizes pace; a step also fills and drains
    known = exact and kind == "stages"
    bound = problem.setting.rows / pace if known else bound_rows_per_s(problem, share=kind != "stages")
    prediction = predict_pipelines(problem, pipelines, request.num_rows, bound)
    return Candidate(kind=kind, problem=problem, pipelines=pipelines, prediction=prediction, exact=exact)


def with_rotation(best: Candidate, request: PlanRequest) -> Candidate | None:
    """Return a pipeline with several cut sets in rotation; None if that is not faster with these short queues."""
    problem, (pipeline, *more) = best.problem, best.pipelines
    found = None if more else rotated(problem, pipeline)
    if found is None:
        return None
    prediction = predict_pipelines(problem, (found,), request.num_rows, bound_rows_per_s(problem, share=True))
    if prediction.rows_per_s <= best.prediction.rows_per_s * (1 + EQUAL):
        return None
    return Candidate(kind="rotating cuts", problem=problem, pipelines=(found,), prediction=prediction, exact=False)


def bound_rows_per_s(problem: Problem, *, share: bool) -> float:
    """Return an upper bound on the throughput of any plan; see `bottleneck_bound_s`."""
    bound = bottleneck_bound_s(problem, share=share)
    return problem.setting.rows / bound if bound else math.inf


def _single(problem: Problem, request: PlanRequest) -> list[Candidate]:
    """Return the best pipelines with one device per stage."""
    aim: Literal["pace", "latency"] = "latency" if request.aim == "latency" else "pace"
    counts = problem.setting.counts_stages
    found = _for_each_size(problem, aim) if counts else best_divisions(problem, aim=aim)
    if found is None and aim == "pace":
        return _many(problem, request)
    if found is None:
        raise PlanError(
            f"searching for the smallest latency on {len(problem.devices)} unequal devices takes too long; "
            "name fewer devices in the cluster file, the fastest ones"
        )
    divisions = [division for _, division in found.values()]
    if aim == "pace":
        divisions = [refine(problem, division) for division in divisions]
    return [as_candidate(problem, "stages", ((1.0, division),), request, exact=True) for division in divisions]


def fits(prediction: Prediction, cluster: Cluster) -> bool:
    """Return True if all devices have the memory that is predicted."""
    return all(load.memory_bytes <= cluster.device(load.device).memory_bytes for load in prediction.devices)


def _interleaved(problem: Problem, request: PlanRequest) -> list[Candidate]:
    """Return pipelines with several stages per device."""
    if len(problem.devices) == 1:
        name = problem.setting.schedule
        raise PlanError(f"the schedule {name} needs several devices; got 1; use --schedule {DEFAULT_SCHEDULE}")
    return [as_candidate(problem, "stages", ((1.0, d),), request, exact=False) for d in interleaved_divisions(problem)]


def _for_each_size(problem: Problem, aim: Literal["pace", "latency"]) -> dict[int, tuple[float, Division]] | None:
    """Search separately for each number of stages; None if a search is too large."""
    found: dict[int, tuple[float, Division]] = {}
    for size in range(1, min(len(problem.devices), problem.num_units) + 1):
        best = best_divisions(problem.for_stages(size), aim=aim)
        if best is None:
            return None
        found |= {number: each for number, each in best.items() if number == size}
    return found


def _many(problem: Problem, request: PlanRequest) -> list[Candidate]:
    """Return pipelines for numbers of devices that are too large to search every order."""
    division = good_division(problem)
    if division is None:
        return []
    # a known pace makes the exact search much smaller
    found = best_divisions(problem, at_most_s=bottleneck_s(problem, division) * (1 + 1e-9), effort=_BOUNDED_EFFORT)
    if found:
        divisions = [refine(problem, d, reach=16) for _, d in found.values()]
        return [as_candidate(problem, "stages", ((1.0, d),), request, exact=True) for d in divisions]
    candidates = [as_candidate(problem, "stages", ((1.0, division),), request, exact=False)]
    if request.aim == "devices":
        candidates += _fewer(problem, request)
    return candidates


def _fewer(problem: Problem, request: PlanRequest) -> list[Candidate]:
    """Find the number of fastest devices that suffices for the target, by bisection."""
    order = sorted(range(len(problem.devices)), key=lambda number: -problem.speeds[number])
    low, high = 1, len(order)
    found: list[Candidate] = []
    while low < high:
        middle = (low + high) // 2
        division = good_division(problem, order[:middle])
        candidate = as_candidate(problem, "stages", ((1.0, division),), request, exact=False) if division else None
        if candidate is not None and candidate.prediction.rows_per_s >= (request.target_rows_per_s or 0.0):
            found.append(candidate)
            high = middle
        else:
            low = middle + 1
    return found


def _replicas(problem: Problem, request: PlanRequest) -> list[Candidate]:
    """Return whole pipelines in parallel."""
    if problem.setting.trains:
        return _replicas_that_train(problem, request)
    return [_side_by_side(problem, divisions, request) for _, divisions in best_replicas(problem)[:2]]


def _side_by_side(problem: Problem, divisions: tuple[Division, ...], request: PlanRequest) -> Candidate:
    rates = rates_of(problem, divisions)
    total = sum(rates)
    shares = [(rate / total, division) for rate, division in zip(rates, divisions, strict=True) if rate > 1e-9 * total]
    return as_candidate(problem, "replicas", shares, request, exact=False)


def _replicas_that_train(problem: Problem, request: PlanRequest) -> list[Candidate]:
    total = problem.setting.num_microbatches or 1
    found = []
    for _, divisions, counts in best_steps(problem)[:2]:
        shares = [(count / total, division) for division, count in zip(divisions, counts, strict=True)]
        found.append(as_candidate(problem, "replicas", shares, request, exact=False))
    return found


def _pipeline(problem: Problem, division: Division, share: float) -> PlannedPipeline:
    names = problem.profile.cuts
    stages = tuple(PlannedStage(device=problem.devices[stage.device].name) for stage in division)
    cuts = tuple(names[stage.start - 1] for stage in division[1:])
    return PlannedPipeline(stages=stages, cut_sets=(CutSet(cuts=cuts),), share=share)
