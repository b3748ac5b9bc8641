"""Let a pipeline's cuts alternate: a candidate with several cut sets, where that is faster."""

from collections.abc import Sequence
from itertools import pairwise

from penstock.plan.cost.predict import predict_pipelines
from penstock.plan.cost.problem import Problem
from penstock.plan.cost.stage_cost import Vector
from penstock.plan.request import EQUAL, Candidate, Request, bound_rows_per_s
from penstock.plan.search.alternate import Lines, alternate
from penstock.spec.plan import CutSet, Pipeline

# a program over more cuts than this takes longer than its gain is worth
_MAX_ALTERNATING_STAGES = 64


def alternating(best: Candidate, request: Request) -> Candidate | None:
    """Let a pipeline's cuts alternate, if that is faster with queues as short as they are."""
    problem, (pipeline, *more) = best.problem, best.pipelines
    stages = pipeline.stages
    plain = not more and all(len(stage.devices) == 1 for stage in stages) and not problem.setting.trains
    if not plain or not 2 <= len(stages) <= _MAX_ALTERNATING_STAGES:
        return None
    names = problem.profile.cuts
    cuts = [names.index(name) + 1 for name in pipeline.cut_sets[0].cuts]
    numbers = [problem.numbers[stage.devices[0]] for stage in stages]
    bounds = [0, *cuts, problem.num_units]

    def holds(stage: int, start: int, end: int) -> bool:
        return _union_fits(problem, numbers[stage], (start, bounds[stage]), (bounds[stage + 1], end))

    lines = _lines(problem, numbers)
    sets = alternate(lines, cuts, holds=holds)
    if len(sets) < 2:
        return None
    cut_sets = tuple(CutSet(cuts=tuple(names[b - 1] for b in chosen), weight=weight) for chosen, weight in sets)
    pipelines = (Pipeline(stages=stages, cut_sets=cut_sets),)
    bound = bound_rows_per_s(problem, share=True)
    prediction = predict_pipelines(problem, pipelines, request.num_rows, bound)
    if prediction.rows_per_s <= best.prediction.rows_per_s * (1 + EQUAL):
        return None
    return Candidate(kind="alternating cuts", problem=problem, pipelines=pipelines, prediction=prediction, exact=False)


def _lines(problem: Problem, numbers: Sequence[int]) -> Lines:
    terms = [problem.terms(number) for number in numbers]
    cpu = [t.pairs()[0] for t in terms]
    crossing: list[Vector] = []
    if any(device.bandwidth_bytes_per_s for device in problem.devices) or problem.cluster.links:
        crossing = [problem.costs.crossing * problem.wire_s(a, b) for a, b in pairwise(numbers)]
    return Lines(starts=[first for first, _ in cpu], ends=[last for _, last in cpu], crossing=crossing)


def _union_fits(problem: Problem, number: int, starts: tuple[int, int], ends: tuple[int, int]) -> bool:
    """Return whether a device can hold all units of a stage whose cuts move within these boundaries."""
    first, last = problem.terms(number).memory
    need = float(problem.costs.held_bytes[min(starts), max(ends)])
    need += float(first[min(starts) : max(starts) + 1].max() + last[min(ends) : max(ends) + 1].max())
    return need <= problem.devices[number].memory_bytes
