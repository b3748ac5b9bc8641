"""What no plan can be faster than."""

from collections.abc import Sequence

import numpy as np

from penstock.plan.cost import Vector
from penstock.plan.problem import Problem


def pace_bound_s(problem: Problem, *, share: bool = False, numbers: Sequence[int] | None = None) -> float:
    """Give seconds between microbatches that no plan of these devices goes below.

    It lets units be divided at will and devices be filled to the brim: every device that takes part pays its
    overhead and the cheapest cut there is. Without sharing, the heaviest unit also needs the fastest device for
    itself. With `share`, devices may take turns on stages or whole pipelines, which only leaves the work itself.
    `numbers` are the devices that may be used, where not all may.

    Example:
        gap = pace_s / pace_bound_s(problem) - 1
    """
    costs = problem.costs
    chosen = list(range(len(problem.devices))) if numbers is None else list(numbers)
    speeds = problem.speeds[chosen]
    inner = slice(1, problem.num_units)
    cheapest = 0.0
    if not share and problem.num_units > 1:
        cheapest = float(costs.before_s[inner].min() + costs.behind_s[inner].min())
    fixed = 0.0 if share else costs.overhead_s + cheapest
    # n stages have n - 1 cuts, but every device pays for one in `fixed`
    work = costs.total_s + (costs.overhead_s if share else -cheapest)
    lost = fixed + costs.feeding_s * (np.array(chosen) == problem.feeder)
    heaviest = float(np.diff(costs.seconds).max()) + costs.overhead_s
    low = costs.feeding_s / problem.devices[problem.feeder].speed
    if not share:
        low = max(low, heaviest / float(speeds.max()))
    high = max(low, (work + fixed + costs.feeding_s) / float(speeds.min())) * 2 + 1e-300
    if _able(speeds, low, lost) >= work:
        return low
    for _ in range(100):
        middle = (low + high) / 2
        if _able(speeds, middle, lost) >= work:
            high = middle
        else:
            low = middle
    return low


def _able(speeds: Vector, pace_s: float, lost: Vector) -> float:
    """Give the work that all devices can do in the time of one microbatch."""
    return float(np.maximum(speeds * pace_s - lost, 0.0).sum())
