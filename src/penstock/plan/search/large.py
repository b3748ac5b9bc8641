"""Heuristic search for a good pipeline on many unequal devices, too many to search every order.

For a given pace, devices are placed from the end of the model to its start: each takes the longest stage that it can
run in time and hold in memory. A beam keeps the few partial pipelines that waste least: time left over because units
are not divisible, and CPU time for the bytes at the cut. Among many devices there is usually one whose speed fits the
next units. The pace is found by bisection, from the bound upwards; then the cuts are refined for the order found.
`bottleneck_bound_s` bounds the distance from the optimum.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.plan.cost.problem import Division, Placed, Problem, bottleneck_bound_s, bottleneck_s, fits_all
from penstock.plan.cost.stage_cost import Vector
from penstock.plan.search.partition import ROUNDING, best_cuts

_Numbers: TypeAlias = NDArray[np.intp]


def refine(problem: Problem, division: Division, *, reach: int | None = None) -> Division:
    """Move cuts to minimize the busiest stage or link, without moving devices.

    Ties are resolved by the smallest latency. With `reach`, a cut moves by at most this number of boundaries; without
    it, the result is optimal for this order of devices.
    """
    last, reach = problem.num_units, problem.num_units if reach is None else reach
    windows = [slice(max(1, stage.start - reach), min(last, stage.start + reach + 1)) for stage in division[1:]]
    windows = [slice(0, 1), *windows, slice(last, last + 1)]
    costs, paths = [], []
    for index, (stage, in_flight) in enumerate(zip(division, problem.in_flight(division), strict=True)):
        starts, ends = windows[index], windows[index + 1]
        cost = problem.cost_block(stage.device, in_flight, starts, ends)
        first, final = problem.path_terms(stage.device)
        path = first[starts, None] + final[None, ends]
        if index:
            before, crossing = division[index - 1].device, problem.costs.crossing[starts, None]
            cost = np.maximum(cost, crossing * problem.byte_s(before, stage.device))
            path = path + crossing * problem.wire_s(before, stage.device)
        costs.append(cost)
        paths.append(path)
    chosen = best_cuts(costs, paths)
    if chosen is None:
        return division
    bounds = [0, *(window.start + place for window, place in zip(windows[1:-1], chosen, strict=True)), last]
    return tuple(Placed(stage.device, *ends) for stage, ends in zip(division, pairwise(bounds), strict=True))


# number of partial pipelines to keep, and of extensions of each
_BEAM = 2
# number of extensions to compare, with the smallest estimated waste
_COMPARED = 4
# number of boundaries near the end of the longest stage to consider, in search of one with fewer bytes
_NEAR = 12
_REFINE_REACH = 12
_FINAL_REACH = 40
_TOLERANCE = 2e-3


def good_division(problem: Problem, numbers: Sequence[int] | None = None) -> Division | None:
    """Return a pipeline with a pace near the optimum; None if none fits into memory.

    `numbers` are the usable devices, by default all.

    Example:
        division = good_division(problem)
        gap = bottleneck_s(problem, division) / bottleneck_bound_s(problem) - 1
    """
    bound = max(bottleneck_bound_s(problem, numbers=numbers), 1e-12)
    filler = _Filler(problem, range(len(problem.devices)) if numbers is None else numbers)
    best: Division | None = None
    low, high, factor = bound, math.inf, 1.01
    while high > low * (1 + _TOLERANCE):
        pace_s = bound * factor if best is None else (low + high) / 2
        found = filler.fill(pace_s)
        if found is not None:
            found = refine(problem, found, reach=_REFINE_REACH)
            if best is None or bottleneck_s(problem, found) < bottleneck_s(problem, best):
                best = found
            high = min(pace_s, bottleneck_s(problem, best))
        elif factor > 1e6:
            return None
        else:
            low, factor = pace_s, 1 + (factor - 1) * 2
    return None if best is None else refine(problem, best, reach=_FINAL_REACH)


class _Filler:
    """A search for pipelines of a given pace on some of the devices."""

    def __init__(self, problem: Problem, numbers: Sequence[int]) -> None:
        self.problem, self.numbers = problem, np.array(numbers)
        rates = [device.bandwidth_bytes_per_s for device in problem.devices]
        self.byte_s = np.array([1 / rate if rate else 0.0 for rate in rates])
        self.driving_s = np.zeros(len(rates))
        self.driving_s[problem.feeder] = problem.feeding_only_s()

    def fill(self, pace_s: float) -> Division | None:
        """Return a pipeline of this pace, if found."""
        beam: list[tuple[float, Division]] = [(0.0, ())]
        while beam:
            longer: dict[tuple[float, int], Division] = {}
            for wasted, division in beam:
                for more, stage in self._stages_before(division, pace_s):
                    longer.setdefault((round(wasted + more, 12), -stage.start), (stage, *division))
            for division in longer.values():
                if division[0].start == 0 and fits_all(self.problem, division):
                    return division
            open_ones = sorted(key for key in longer if key[1])
            beam = [(key[0], longer[key]) for key in open_ones[:_BEAM]]
        return None

    def _stages_before(self, division: Division, pace_s: float) -> list[tuple[float, Placed]]:
        """Return the stages before a partial pipeline that waste least, each with its waste in seconds of work.

        A device wastes the time that is left over, and the next device's time for the bytes at the cut.
        """
        problem, costs = self.problem, self.problem.costs
        end = division[0].start if division else problem.num_units
        in_flight = problem.setting.in_flight(len(division) + 1)
        left = np.setdiff1d(self.numbers, [stage.device for stage in division])
        able = problem.speeds[left] * np.maximum(pace_s - self.driving_s[left], 0.0)
        found: list[tuple[float, Placed]] = []
        for index in np.argsort(self._estimates(left, able, end, pace_s), kind="stable"):
            number = int(left[index])
            if division and costs.crossing[end] * problem.byte_s(number, division[0].device) > pace_s:
                continue
            seconds = problem.cost_block(number, in_flight, slice(0, end), slice(end, end + 1))[:, 0]
            starts = np.flatnonzero(seconds <= pace_s * ROUNDING)[:_NEAR]
            if not len(starts):
                continue
            wasted = able[index] - (costs.seconds[end] - costs.seconds[starts]) + costs.after_s[starts]
            # at the start of the model no work is left, so no time is wasted
            wasted = np.where(starts == 0, -1.0, wasted)
            found.append((float(wasted.min()), Placed(number, int(starts[wasted.argmin()]), end)))
            if len(found) == _COMPARED:
                break
        return sorted(found, key=lambda item: item[0])[:_BEAM]

    def _estimates(self, left: _Numbers, able: Vector, end: int, pace_s: float) -> Vector:
        """Return about what each device wastes, without regard to memory and what driving saves; infinite for none."""
        costs = self.problem.costs
        tail = costs.seconds[end] + costs.overhead_s + costs.after_s[end]
        first = np.searchsorted(costs.seconds, tail - able - 1e-12)
        starts = np.minimum(first[:, None] + np.arange(_NEAR), end)
        spare = able[:, None] - (tail - costs.seconds[starts])
        wire_s = np.maximum(costs.crossing[end], costs.crossing[starts]) * self.byte_s[left, None]
        possible = (starts < end) & (spare >= costs.before_s[starts]) & (wire_s <= pace_s)
        wasted: Vector = np.where(possible, spare + costs.after_s[starts] * (starts > 0), np.inf)
        least: Vector = wasted.min(axis=1)
        return least
