"""Move the cuts of a pipeline whose devices are in place: first for its pace, then for a short way through."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.plan.cost.pipeline_cost import shared_block
from penstock.plan.cost.problem import Division, Placed, Problem
from penstock.plan.cost.stage_cost import Vector

# rounding of sums taken in another order
_ROUNDING = 1 + 1e-12


def refine(problem: Problem, division: Division, *, reach: int | None = None) -> Division:
    """Assign every stage the units that make the busiest stage least busy, its device staying where it is.

    Of all that are as good it takes the one with the smallest latency. With `reach`, a cut moves by at most so
    many boundaries; without, the result is the best for this order of devices.

    Dynamic programming over cuts, one stage after the other.
    """
    last = problem.num_units
    if len(division) == 1:
        return division
    windows = [slice(0, 1)]
    for stage in division[1:]:
        low = 1 if reach is None else max(1, stage.start - reach)
        high = last if reach is None else min(last, stage.start + reach + 1)
        windows.append(slice(low, high))
    windows.append(slice(last, last + 1))
    blocks = [_block(problem, division, index, windows[index], windows[index + 1]) for index in range(len(division))]
    links = [
        _link(problem, one, other, window)
        for (one, other), window in zip(pairwise(division), windows[1:-1], strict=True)
    ]
    best = _fastest(blocks, links)
    if not best < math.inf:
        return division
    bounds = _shortest(problem, division, windows, blocks, links, best * _ROUNDING)
    return tuple(
        Placed(stage.devices, start, end) for stage, (start, end) in zip(division, pairwise(bounds), strict=True)
    )


def _block(problem: Problem, division: Division, index: int, starts: slice, ends: slice) -> Vector:
    devices = division[index].devices
    if len(devices) == 1:
        return problem.cost_block(devices[0], problem.in_flight(division)[index], starts, ends)
    return shared_block(problem, [(number, 1) for number in devices], starts, ends)


def _link(problem: Problem, one: Placed, other: Placed, window: slice) -> Vector:
    if len(one.devices) > 1 or len(other.devices) > 1:
        return np.zeros(window.stop - window.start)
    return problem.costs.crossing[window] * problem.byte_s(one.devices[0], other.devices[0])


def _fastest(blocks: Sequence[Vector], links: Sequence[Vector]) -> float:
    best = blocks[0][0]
    for block, link in zip(blocks[1:], links, strict=True):
        best = np.maximum(np.maximum(best, link)[:, None], block).min(axis=0)
    return float(best[0])


def _shortest(
    problem: Problem, division: Division, windows: Sequence[slice], blocks: Sequence[Vector],
    links: Sequence[Vector], limit: float,
) -> list[int]:  # fmt: skip
    """Choose the cuts with the smallest latency among those within the limit."""
    best: Vector = np.zeros(1)
    choices: list[Vector] = []
    for index, stage in enumerate(division):
        starts, ends = windows[index], windows[index + 1]
        paths = [problem.path_terms(number) for number in stage.devices]
        path = np.max([first[starts, None] + last[None, ends] for first, last in paths], axis=0)
        if index:
            # the slowest way between any two that talk to each other
            wire = max(problem.wire_s(a, b) for a in division[index - 1].devices[:4] for b in stage.devices[:4])
            best = np.where(links[index - 1] <= limit, best + problem.costs.crossing[starts] * wire, np.inf)
        total = np.where(blocks[index] <= limit, best[:, None] + path, np.inf)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    bounds = [problem.num_units]
    place = 0
    for index in range(len(division) - 1, 0, -1):
        place = int(choices[index][place])
        bounds.append(windows[index].start + place)
    return [0, *bounds[::-1]]
