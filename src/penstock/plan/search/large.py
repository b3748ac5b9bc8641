"""Heuristic search for a good pipeline on many unequal devices, too many to search every order.

For a given pace, devices are placed from the end of the model to its start: each takes the longest stage that it can
run in time and hold in memory. A beam keeps the few partial pipelines that waste least: time left over because units
are not divisible, and CPU time for the bytes at the cut. Among many devices there is usually one whose speed fits the
next units. The pace is found by bisection, from the bound upwards; then the cuts are refined for the order found.
`bottleneck_bound_s` bounds the distance from the optimum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.plan.cost.pipeline_cost import bottleneck_bound_s, bottleneck_s, fits_all
from penstock.plan.cost.problem import Division, Placed, Problem
from penstock.plan.cost.stage_cost import Vector

# rounding error of sums in another order
_ROUNDING = 1 + 1e-12


def refine(problem: Problem, division: Division, *, reach: int | None = None) -> Division:
    """Move cuts to minimize the busiest stage, without moving devices.

    Ties are resolved by the smallest latency. With `reach`, a cut moves by at most this number of boundaries; without
    it, the result is optimal for this order of devices.

    Dynamic programming over cuts, stage by stage.
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
        Placed(stage.device, start, end) for stage, (start, end) in zip(division, pairwise(bounds), strict=True)
    )


def _block(problem: Problem, division: Division, index: int, starts: slice, ends: slice) -> Vector:
    return problem.cost_block(division[index].device, problem.in_flight(division)[index], starts, ends)


def _link(problem: Problem, one: Placed, other: Placed, window: slice) -> Vector:
    return problem.costs.crossing[window] * problem.byte_s(one.device, other.device)


def _fastest(blocks: Sequence[Vector], links: Sequence[Vector]) -> float:
    best = blocks[0][0]
    for block, link in zip(blocks[1:], links, strict=True):
        best = np.maximum(np.maximum(best, link)[:, None], block).min(axis=0)
    return float(best[0])


def _shortest(
    problem: Problem, division: Division, windows: Sequence[slice], blocks: Sequence[Vector],
    links: Sequence[Vector], limit: float,
) -> list[int]:  # fmt: skip
    """Choose the cuts with the smallest latency among cuts within the limit."""
    best: Vector = np.zeros(1)
    choices: list[Vector] = []
    for index, stage in enumerate(division):
        starts, ends = windows[index], windows[index + 1]
        first, last = problem.path_terms(stage.device)
        path = first[starts, None] + last[None, ends]
        if index:
            wire = problem.wire_s(division[index - 1].device, stage.device)
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


_Numbers: TypeAlias = NDArray[np.intp]
_BEAM = 16
# candidates per partial pipeline: of a thousand devices, 64 across all speeds suffice
_CANDIDATES = 64
# number of boundaries near the end of the longest stage to consider, in search of one with fewer bytes
_NEAR = 12
_KEPT = 4
_REFINE_REACH = 12
_TOLERANCE = 2e-3


@dataclass(frozen=True, slots=True, eq=False)
class _Begin:
    """Devices placed from the end of the model down to a boundary."""

    boundary: int
    wasted: float
    used: NDArray[np.bool_]
    num_stages: int
    stages: tuple[int, int, "_Begin | None"] | None  # device, end, and the later stages


def good_division(problem: Problem, numbers: Sequence[int] | None = None) -> Division | None:
    """Return a pipeline with a pace near the optimum; None if none fits into memory.

    `numbers` are the usable devices, by default all.

    Example:
        division = good_division(problem)
        gap = bottleneck_s(problem, division) / bottleneck_bound_s(problem) - 1
    """
    bound = max(bottleneck_bound_s(problem, numbers=numbers), 1e-12)
    filler = _Filler(problem, range(len(problem.devices)) if numbers is None else numbers)
    low, found, factor = bound, None, 1.01
    while found is None and factor < 1e6:
        found = filler.fill(bound * factor)
        if found is None:
            low, factor = bound * factor, 1 + (factor - 1) * 2
    if found is None:
        return None
    best = refine(problem, found, reach=_REFINE_REACH)
    high = min(bound * factor, bottleneck_s(problem, best))
    while high > low * (1 + _TOLERANCE):
        middle = (low + high) / 2
        found = filler.fill(middle)
        if found is None:
            low = middle
            continue
        refined = refine(problem, found, reach=_REFINE_REACH)
        if bottleneck_s(problem, refined) < bottleneck_s(problem, best):
            best = refined
        high = min(middle, bottleneck_s(problem, best))
    return _refine_on(problem, best)


def _refine_on(problem: Problem, division: Division) -> Division:
    """Refine cuts until they no longer change."""
    best = bottleneck_s(problem, division)
    for _ in range(20):
        division = refine(problem, division, reach=_REFINE_REACH)
        reached = bottleneck_s(problem, division)
        if reached >= best * (1 - 1e-9):
            break
        best = reached
    return division


class _Filler:
    def __init__(self, problem: Problem, numbers: Sequence[int]) -> None:
        self.problem = problem
        self.closed = np.ones(len(problem.devices), dtype=np.bool_)
        self.closed[list(numbers)] = False
        costs = problem.costs
        self.seconds = costs.seconds
        self.by_speed = np.argsort(-problem.speeds, kind="stable")
        rates = [device.bandwidth_bytes_per_s for device in problem.devices]
        self.byte_s = np.array([1 / rate if rate else 0.0 for rate in rates])
        self.memory = np.array([float(device.memory_bytes) for device in problem.devices])
        self.memory -= problem.profile.base_bytes + problem.setting.recording_bytes
        self.messages = costs.messages_bytes()
        self.memory[problem.feeder] -= self.messages[0] + self.messages[-1]
        self.memory[slice(None) if problem.setting.trains else problem.feeder] -= problem.profile.script_bytes
        # as if the driver held neither end; `refine` accounts for it
        self.lost_s = np.zeros(len(rates))
        self.lost_s[problem.feeder] = problem.feeding_only_s()
        self.held = costs.held_bytes

    def fill(self, bottleneck_s: float) -> Division | None:
        """Return a pipeline of this pace, if found."""
        problem = self.problem
        beam = [_Begin(problem.num_units, 0.0, self.closed, 0, None)]
        able = problem.speeds * np.maximum(bottleneck_s - self.lost_s, 0)
        spare = float(able[~self.closed].sum()) - problem.costs.total_s
        while beam:
            following: dict[tuple[int, float], _Begin] = {}
            for begin in beam:
                for more in self._extend(begin, bottleneck_s):
                    if more.boundary == 0:
                        division = self._division(more)
                        if fits_all(problem, division):
                            return division
                        continue
                    if more.wasted <= spare:
                        following.setdefault((more.boundary, round(more.wasted, 12)), more)
            beam = sorted(following.values(), key=lambda begin: (begin.wasted, -begin.boundary))[:_BEAM]
        return None

    def _extend(self, begin: _Begin, bottleneck_s: float) -> list[_Begin]:
        """Place one more device before the placed devices, choosing those that waste least."""
        devices = self._candidates(begin)
        if not len(devices):
            return []
        starts, wasted = self._longest(begin, devices, bottleneck_s)
        order = np.argsort(wasted, kind="stable")[:_KEPT]
        extended: list[_Begin] = []
        for index in order:
            if not wasted[index] < np.inf:
                break
            used = begin.used.copy()
            used[devices[index]] = True
            stages = (int(devices[index]), begin.boundary, begin)
            loss = begin.wasted + float(wasted[index])
            extended.append(_Begin(int(starts[index]), loss, used, begin.num_stages + 1, stages))
        return extended

    def _candidates(self, begin: _Begin) -> _Numbers:
        left = self.by_speed[~begin.used[self.by_speed]]
        if len(left) <= _CANDIDATES:
            return left
        return left[np.linspace(0, len(left) - 1, _CANDIDATES).astype(np.intp)]

    def _longest(self, begin: _Begin, devices: _Numbers, bottleneck_s: float) -> tuple[_Numbers, Vector]:
        """Return for each device the start of the stage that wastes least, and the waste."""
        problem, costs, end = self.problem, self.problem.costs, begin.boundary
        in_flight = problem.setting.in_flight(begin.num_stages + 1)
        able = problem.speeds[devices] * np.maximum(bottleneck_s - self.lost_s[devices], 0.0)
        tail = self.seconds[end] + costs.overhead_s + costs.after_s[end]
        first = np.searchsorted(self.seconds, tail - able - 1e-12)
        if not np.isinf(self.memory).any():
            # the bytes of a stage only grow towards the start
            need = self.held[: end + 1, end] + in_flight * (costs.kept_at_end_bytes[end] - costs.kept_bytes[: end + 1])
            room = self.memory[devices] - self.messages[end]
            first = np.maximum(first, end + 1 - np.searchsorted(need[::-1], room, side="right"))
        starts = np.minimum(first[:, None] + np.arange(_NEAR), end)
        seconds = tail - self.seconds[starts] + costs.before_s[starts]
        possible = (starts < end) & (seconds <= able[:, None] * (1 + 1e-12))
        possible &= self._in_time(begin, devices, starts, bottleneck_s)
        need = self.held[starts, end] + in_flight * (costs.kept_at_end_bytes[end] - costs.kept_bytes[starts])
        possible &= need + self.messages[starts] + self.messages[end] <= self.memory[devices][:, None]
        # the device's own waste, plus the next device's cost of the bytes at this cut
        wasted = able[:, None] - (self.seconds[end] - self.seconds[starts]) + costs.after_s[starts] * (starts > 0)
        # at the start of the model no work is left, so no time is wasted
        wasted = np.where(possible, np.where(starts == 0, -1.0, wasted), np.inf)
        best = wasted.argmin(axis=1)
        rows = np.arange(len(devices))
        return starts[rows, best], wasted[rows, best]

    def _in_time(self, begin: _Begin, devices: _Numbers, starts: _Numbers, bottleneck_s: float) -> NDArray[np.bool_]:
        """Return a mask of stages whose links are within the pace, including the driver's own messages."""
        costs, problem, end = self.problem.costs, self.problem, begin.boundary
        per_byte = self.byte_s[devices][:, None]
        feeds = (devices == problem.feeder)[:, None]
        out = costs.crossing[end] + costs.returning[starts] + feeds * costs.crossing[0]
        into = costs.crossing[starts] + costs.returning[end] + feeds * costs.crossing[-1]
        in_time: NDArray[np.bool_] = np.maximum(out, into) * per_byte <= bottleneck_s
        if problem.cluster.links and begin.stages is not None:
            between = np.array([problem.byte_s(int(device), begin.stages[0]) for device in devices])
            in_time &= (between * costs.crossing[end] <= bottleneck_s)[:, None]
        return in_time

    def _division(self, begin: _Begin) -> Division:
        placed: list[Placed] = []
        at: _Begin | None = begin
        while at is not None and at.stages is not None:
            start = at.boundary
            device, end, at = at.stages
            placed.append(Placed(device, start, end))
        return tuple(placed)
