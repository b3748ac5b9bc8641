"""Costs of a pipeline: bottleneck, latency and memory; and a lower bound on the pace of any plan."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from penstock.plan.cost.problem import Division, Problem
from penstock.plan.cost.stage_cost import Vector


def bottleneck_s(problem: Problem, division: Division) -> float:
    """Return the seconds between microbatches of a full pipeline, set by its busiest device or link."""
    pace = max(problem.load_s(stage.device, stage.start, stage.end) for stage in division)
    for one, other in pairwise(division):
        between = problem.byte_s(one.device, other.device)
        pace = max(pace, float(problem.costs.crossing[one.end]) * between)
    if not any(stage.device == problem.feeder for stage in division):
        pace = max(pace, problem.feeding_only_s())
    return pace


def latency_s(problem: Problem, division: Division) -> float:
    """Return the seconds from sending a microbatch into an empty pipeline until its result arrives."""
    costs, feeder = problem.costs, problem.feeder
    total = costs.feeding_s / problem.devices[feeder].speed
    places = [feeder, *(stage.device for stage in division), feeder]
    bounds = [*(stage.start for stage in division), problem.num_units]
    for (one, other), boundary in zip(pairwise(places), bounds, strict=True):
        total += problem.transfer_s(one, other, boundary) + problem.latency_s(one, other)
    total += sum(problem.own_s(stage.device, stage) for stage in division)
    return total


def fits_all(problem: Problem, division: Division) -> bool:
    """Return True if every device of a pipeline has the memory for its stage."""
    return all(
        problem.fits(stage.device, stage.start, stage.end, in_flight)
        for stage, in_flight in zip(division, problem.in_flight(division), strict=True)
    )


_PRECISION = 1e-5
# quantiles above which units are counted as heavy
_HEAVY = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


def bottleneck_bound_s(problem: Problem, *, share: bool = False, numbers: Sequence[int] | None = None) -> float:
    """Return a lower bound on the seconds between microbatches of any plan on these devices.

    Each device can at most run the stage with the most work that it can do within that time, anywhere in the model;
    together the devices must run the whole model. Memory and links are ignored. With `share`, devices may share
    microbatches; then devices can be filled completely, and only the total work counts. `numbers` are the usable
    devices, by default all.

    Example:
        gap = bottleneck_s / bottleneck_bound_s(problem) - 1
    """
    costs = problem.costs
    chosen = list(range(len(problem.devices))) if numbers is None else list(numbers)
    speeds = problem.speeds[chosen]
    feeding = costs.feeding_s * (np.array(chosen) == problem.feeder)
    # a driver that holds both ends may save more than the overhead of its stage
    ends = costs.overhead_s - costs.own_input_s - costs.own_output_s
    feeder_s = (costs.feeding_s + min(0.0, ends)) / problem.devices[problem.feeder].speed
    work = costs.total_s + (ends if share else min(0.0, ends))
    # if devices can be filled completely, only the total work counts
    enough: Callable[[Vector], bool] = (
        (lambda budgets: float(budgets.sum()) >= work * (1 - 1e-12)) if share else _Stages(problem).enough
    )
    low = max(feeder_s, work / float(speeds.sum()))
    if enough(np.maximum(speeds * low - feeding, 0.0)):
        return low
    high = max(low, (2 * work + costs.overhead_s + costs.feeding_s) / float(speeds.min()))
    high += float(costs.before_s.max() + costs.after_s.max()) / float(speeds.min())
    while high > max(low * (1 + _PRECISION), 1e-300):
        # the bound is usually near the lower end, so bisect the ratio
        middle = math.sqrt(low * high) if low else high / 2
        if enough(np.maximum(speeds * middle - feeding, 0.0)):
            high = middle
        else:
            low = middle
    return low


class _Stages:
    """A test whether devices could run the whole model, if each ran the stage with the most work that it can do.

    It compares the work in seconds, and the numbers of units above several weights: few devices may be fast enough for
    a heavy unit, and these have time for only a few units.
    """

    def __init__(self, problem: Problem) -> None:
        costs = problem.costs
        # messages at the model's ends may not leave the driver
        before, after = costs.before_s.copy(), costs.after_s.copy()
        before[0], after[-1] = -costs.own_input_s, -costs.own_output_s
        self.starts = costs.seconds - before - costs.overhead_s
        ends = costs.seconds + after
        # to find the last boundary within a limit: costs of ends are not monotonic, but their minimum from a boundary
        # on is
        self.least = np.minimum.accumulate(ends[::-1])[::-1]
        units = np.diff(costs.seconds)
        heavy = [np.where(units >= limit, 1.0, 0.0) for limit in np.quantile(units, _HEAVY)]
        self.measures = np.array([np.concatenate([[0.0], np.cumsum(m)]) for m in (units, *heavy)])

    def enough(self, budgets: Vector) -> bool:
        """Return True if devices with these seconds of work per microbatch may be able to run the whole model."""
        total = np.zeros(len(self.measures))
        for budget, count in zip(*np.unique(budgets, return_counts=True), strict=True):
            last = np.searchsorted(self.least, (self.starts + budget) * (1 + 1e-12), side="right") - 1
            most = (self.measures[:, np.maximum(last, 0)] - self.measures).max(axis=1)
            total += np.maximum(most, 0.0) * int(count)
        return bool((total >= self.measures[:, -1] * (1 - 1e-12)).all())
