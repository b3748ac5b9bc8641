"""What no plan can be faster than."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.plan.cost.problem import Problem
from penstock.plan.cost.stage_cost import Vector

_PRECISION = 1e-5
# which part of the units is lighter than those that are counted
_HEAVY = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


def bottleneck_bound_s(problem: Problem, *, share: bool = False, numbers: Sequence[int] | None = None) -> float:
    """Return seconds between microbatches that no plan of these devices goes below.

    Each device could at most do the stage of the most work that it can do in time, wherever in the model that
    lies; in all they must do the whole model. Memory and links are left out of account. With `share`, devices
    may share stages or whole pipelines; then a device can be filled to the brim, which leaves only the
    work itself. `numbers` are the devices that may be used, where not all may.

    Example:
        gap = bottleneck_s / bottleneck_bound_s(problem) - 1
    """
    costs = problem.costs
    chosen = list(range(len(problem.devices))) if numbers is None else list(numbers)
    speeds = problem.speeds[chosen]
    feeding = costs.feeding_s * (np.array(chosen) == problem.feeder)
    # a feeder that holds both ends may be spared more than its stage's overhead
    ends = costs.overhead_s - costs.own_input_s - costs.own_output_s
    feeder_s = (costs.feeding_s + min(0.0, ends)) / problem.devices[problem.feeder].speed
    work = costs.total_s + (ends if share else min(0.0, ends))
    enough: Callable[[Vector], bool] = _Work(work).enough if share else _Stages(problem).enough
    low = max(feeder_s, work / float(speeds.sum()))
    if enough(np.maximum(speeds * low - feeding, 0.0)):
        return low
    high = max(low, (2 * work + costs.overhead_s + costs.feeding_s) / float(speeds.min()))
    high += float(costs.before_s.max() + costs.after_s.max()) / float(speeds.min())
    while high > max(low * (1 + _PRECISION), 1e-300):
        # the answer is mostly near the lower end, so halve the ratio
        middle = math.sqrt(low * high) if low else high / 2
        if enough(np.maximum(speeds * middle - feeding, 0.0)):
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True, slots=True)
class _Work:
    """Whether devices that are filled to the brim could do the work."""

    seconds: float

    def enough(self, budgets: Vector) -> bool:
        """Return whether devices with these seconds of work for each microbatch might do the whole model."""
        return float(budgets.sum()) >= self.seconds * (1 - 1e-12)


class _Stages:
    """Whether devices could do the whole model if each did the one stage of which it can do most.

    That is asked of the work in seconds, and of the number of units at least as heavy as some: few devices may be
    fast enough for a heavy unit, and those have time for few.
    """

    def __init__(self, problem: Problem) -> None:
        costs = problem.costs
        # messages of the model's ends may stay on the feeder
        before, after = costs.before_s.copy(), costs.after_s.copy()
        before[0], after[-1] = -costs.own_input_s, -costs.own_output_s
        self.starts = costs.seconds - before - costs.overhead_s
        ends = costs.seconds + after
        # the last boundary within a limit, though ends do not only rise: the least from each boundary on does
        self.least = np.minimum.accumulate(ends[::-1])[::-1]
        units = np.diff(costs.seconds)
        heavy = [np.where(units >= limit, 1.0, 0.0) for limit in np.quantile(units, _HEAVY)]
        self.measures = np.array([np.concatenate([[0.0], np.cumsum(m)]) for m in (units, *heavy)])

    def enough(self, budgets: Vector) -> bool:
        """Return whether devices with these seconds of work for each microbatch might do the whole model."""
        total = np.zeros(len(self.measures))
        for budget, count in zip(*np.unique(budgets, return_counts=True), strict=True):
            last = np.searchsorted(self.least, (self.starts + budget) * (1 + 1e-12), side="right") - 1
            most = (self.measures[:, np.maximum(last, 0)] - self.measures).max(axis=1)
            total += np.maximum(most, 0.0) * int(count)
        return bool((total >= self.measures[:, -1] * (1 - 1e-12)).all())
