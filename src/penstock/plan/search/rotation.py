"""Cut-set rotation: microbatches use several cut sets round-robin, which evens out the loads of a single cut set.

A stage's work for a microbatch is the sum of a term for its first boundary and a term for its last boundary. On average
over many microbatches, only the *portions* matter: how often each cut is at each boundary. So the best portions are the
solution of a linear program over each cut's portions, for any number of sets:

    smallest T with, for every stage,  sum_a portion[cut before][a] * starts[stage][a]
                                     + sum_b portion[cut after ][b] * ends[stage][b]   <= T

To get a few sets with these portions, a number between 0 and 1 determines the position of every cut, by the cut's
cumulative portions. All cuts then move in the same direction, which keeps the load of a stage near its mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.plan.cost.problem import Problem
from penstock.plan.cost.stage_cost import Vector
from penstock.plan.schedule.round_robin import round_robin_counts
from penstock.spec.plan import CutSet, PlannedPipeline

_Vector: TypeAlias = NDArray[np.float64]
_EPSILON = 1e-9
# Dantzig's rule is fast but may cycle on coinciding vertices; after this many steps without gain, use Bland's rule
_PATIENCE = 20


def minimize(costs: _Vector, matrix: _Vector, limits: _Vector, basis: Sequence[int]) -> tuple[_Vector, list[int]]:
    """Minimize `costs @ x` subject to `matrix @ x == limits` and `x >= 0`; returns x and its basis.

    `basis` has as many columns as the matrix has rows, and its vertex must be feasible. Numbers should be near 1:
    differences below 1e-9 are ignored.

    >>> minimize(np.array([-1.0, 0.0]), np.array([[2.0, 1.0]]), np.array([3.0]), [1])[0].tolist()
    [1.5, 0.0]

    Dantzig's simplex method, with Bland's rule against cycles; each step solves for the basis again, so errors do not
    accumulate. The program must be bounded.
    """
    basis = list(basis)
    best, waited = np.inf, 0
    while True:
        columns = matrix[:, basis]
        values = np.linalg.solve(columns, limits)
        reached = float(costs[basis] @ values)
        waited = 0 if reached < best - _EPSILON else waited + 1
        best = min(best, reached)
        reduced = costs - np.linalg.solve(columns.T, costs[basis]) @ matrix
        reduced[basis] = 0.0
        entering = int(reduced.argmin()) if waited < _PATIENCE else int((reduced < -_EPSILON).argmax())
        if reduced[entering] >= -_EPSILON:
            break
        direction = np.linalg.solve(columns, matrix[:, entering])
        rising = direction > _EPSILON
        if not rising.any():
            raise ArithmeticError("the linear program is unbounded; this is a bug in penstock")
        steps = np.full(len(basis), np.inf)
        steps[rising] = np.maximum(values[rising], 0.0) / direction[rising]
        least = steps.min()
        # among ties the lowest column leaves, as Bland's rule requires
        basis[min(np.flatnonzero(steps <= least + 1e-12), key=lambda row: basis[row])] = entering
    solution = np.zeros(matrix.shape[1])
    solution[basis] = np.maximum(values, 0.0)
    return solution, basis


# boundaries further away than this would only add to the memory of devices
MAX_REACH = 32
# fraction of the best pace that may be given up for smaller moves, which queues absorb better
_SLACK = 2e-4
# a program with more cuts than this takes too long for its gain
_MAX_STAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryCosts:
    """Costs of stages by boundary, one row per stage.

    Stage `s` from boundary `a` to `b` takes `starts[s][a] + ends[s][b]` seconds. `crossing[k][b]`, if given, are the
    seconds of the link of cut `k` if the cut is at boundary `b`.
    """

    starts: Sequence[Vector]
    ends: Sequence[Vector]
    crossing: Sequence[Vector] = ()

    def load(self, stage: int, start: int, end: int) -> float:
        """Return the seconds of a stage between two boundaries."""
        return float(self.starts[stage][start] + self.ends[stage][end])


@dataclass(frozen=True, slots=True)
class Portions:
    """Boundaries of each cut with their portions of microbatches, and the pace in seconds."""

    per_cut: tuple[tuple[tuple[int, float], ...], ...]
    bottleneck_s: float


def rotate(
    costs: BoundaryCosts,
    cuts: Sequence[int],
    *,
    holds: Callable[[int, int, int], bool] = lambda _stage, _start, _end: True,
    period: int = 100,
    reach: int = MAX_REACH,
) -> list[tuple[tuple[int, ...], float]]:
    """Return weighted sets of cuts, near the given cuts, that minimize the largest expected stage.

    `cuts` are the boundaries of the best single set. `holds(stage, start, end)` returns True if a stage's device has
    the memory for all units from `start` to `end`: with several sets it holds the units of all sets. Weights are
    integer fractions of a round of at most `period` microbatches.

    >>> work = np.array([0.0, 3.0, 4.0, 8.0])
    >>> rotate(BoundaryCosts(starts=[-work, -work], ends=[work, work]), [2])
    [((2,), 1.0)]

    The portions are optimal for boundaries that are nearer to each cut than to its neighbours and at most `reach` away.
    If a solution does not fit into a device's memory, the number of boundaries around its cuts is halved until it fits,
    so under a memory limit the result is good but not necessarily optimal.
    """
    last = len(costs.starts[0]) - 1
    bounds = (0, *cuts, last)
    reaches = [reach] * len(cuts)
    while any(reaches):
        windows = _windows(bounds, reaches)
        portions = best_portions(costs, cuts, windows)
        tight = [s for s in range(len(cuts) + 1) if not holds(s, *_extent(s, portions, last))]
        if not tight:
            return _whole_rounds(couple(portions), period)
        for stage in tight:
            for cut in (stage - 1, stage):
                if 0 <= cut < len(cuts):
                    reaches[cut] //= 2
    return [(tuple(cuts), 1.0)]


def best_portions(costs: BoundaryCosts, cuts: Sequence[int], windows: Sequence[Sequence[int]]) -> Portions:
    """Find how often each cut should be at each boundary of its window; each window contains the given cut.

    Among the best solutions (within 0.02% of the pace), it takes the one that moves the cuts least, in squared seconds
    of work.
    """
    program = _Program(costs, cuts, windows)
    solution, basis = minimize(program.pace, program.matrix, program.limits, program.basis)
    program.limits[-1] = float(solution[program.num_places]) * (1 + _SLACK)
    solution, _ = minimize(program.moves, program.matrix, program.limits, basis)
    per_cut: list[tuple[tuple[int, float], ...]] = []
    place = 0
    for window in windows:
        weights = solution[place : place + len(window)]
        weights = np.where(weights < 1e-7, 0.0, weights)
        kept = [(b, float(w)) for b, w in zip(window, weights / weights.sum(), strict=True) if w]
        per_cut.append(tuple(kept))
        place += len(window)
    return Portions(tuple(per_cut), float(solution[program.num_places]) * program.scale)


def couple(portions: Portions) -> list[tuple[tuple[int, ...], float]]:
    """Convert portions to weighted sets of cuts, with all cuts moving together.

    >>> couple(Portions((((3, 0.5), (4, 0.5)), ((7, 0.25), (9, 0.75))), 0.0))
    [((3, 7), 0.25), ((3, 9), 0.25), ((4, 9), 0.5)]
    """
    steps = [np.cumsum([weight for _, weight in cut]) for cut in portions.per_cut]
    points = sorted({0.0, 1.0, *(float(step) for cut in steps for step in cut[:-1])})
    sets: dict[tuple[int, ...], float] = {}
    for low, high in pairwise(points):
        if high - low < 1e-9:
            continue
        where = [int(np.searchsorted(cut[:-1], (low + high) / 2)) for cut in steps]
        chosen = tuple(cut[index][0] for cut, index in zip(portions.per_cut, where, strict=True))
        sets[chosen] = sets.get(chosen, 0.0) + high - low
    return list(sets.items())


class _Program:
    """The linear program in matrix form: portions of all windows, then the pace, then a slack per row."""

    def __init__(self, costs: BoundaryCosts, cuts: Sequence[int], windows: Sequence[Sequence[int]]) -> None:
        num_stages, last = len(cuts) + 1, len(costs.starts[0]) - 1
        bounds = [0, *cuts, last]
        # in units of the pace of the given cuts, so that numbers are near 1
        busy = [costs.load(s, bounds[s], bounds[s + 1]) for s in range(num_stages)]
        busy += [float(costs.crossing[k][cut]) for k, cut in enumerate(cuts) if costs.crossing]
        self.scale = max(max(busy), 1e-300)
        self.num_places = sum(len(window) for window in windows)
        rows = num_stages + (len(cuts) if costs.crossing else 0)
        self.matrix = np.zeros((rows + len(cuts) + 1, self.num_places + 1 + rows + 1))
        self.limits = np.zeros(len(self.matrix))
        self.pace = np.zeros(self.matrix.shape[1])
        self.pace[self.num_places] = 1.0
        self.moves = np.zeros(self.matrix.shape[1])
        self.basis: list[int] = []
        place = 0
        for k, (cut, window) in enumerate(zip(cuts, windows, strict=True)):
            columns = slice(place, place + len(window))
            chosen = list(window)
            # terms of the given cuts are on the other side of the equation, so that differences stay exact
            self.matrix[k, columns] = (costs.ends[k][chosen] - costs.ends[k][cut]) / self.scale
            self.matrix[k + 1, columns] = (costs.starts[k + 1][chosen] - costs.starts[k + 1][cut]) / self.scale
            if costs.crossing:
                self.matrix[num_stages + k, columns] = (costs.crossing[k][chosen] - costs.crossing[k][cut]) / self.scale
            self.matrix[rows + k, columns] = 1.0
            self.limits[rows + k] = 1.0
            moved = np.abs(self.matrix[k, columns]) + np.abs(self.matrix[k + 1, columns])
            # squared, so that many small moves are better than a few large moves
            self.moves[columns] = moved**2
            self.basis.append(place + chosen.index(cut))
            place += len(window)
        self.matrix[:rows, self.num_places] = -1.0
        self.limits[:rows] = -np.array(busy) / self.scale
        self.matrix[range(rows), range(self.num_places + 1, self.num_places + 1 + rows)] = 1.0
        # the last row limits the pace; the second pass lowers the limit to the best pace
        self.matrix[-1, self.num_places] = 1.0
        self.matrix[-1, -1] = 1.0
        self.limits[-1] = 2.0
        slowest = int(np.argmax(busy))
        slack = [self.num_places + 1 + row for row in range(rows) if row != slowest]
        self.basis += [self.num_places, *slack, self.matrix.shape[1] - 1]


def _windows(bounds: Sequence[int], reaches: Sequence[int]) -> list[range]:
    """Return for each cut the boundaries nearer to it than to its neighbours, so that any mixture keeps the order."""
    windows: list[range] = []
    for k, reach in enumerate(reaches):
        before, cut, after = bounds[k : k + 3]
        down = cut - 1 if k == 0 else (cut - before - 1) - (cut - before - 1) // 2
        up = after - cut - 1 if k == len(reaches) - 1 else (after - cut - 1) // 2
        windows.append(range(cut - min(down, reach), cut + min(up, reach) + 1))
    return windows


def _extent(stage: int, portions: Portions, last: int) -> tuple[int, int]:
    """Return the first and last boundary of the units that a stage's device holds."""
    start = min(b for b, _ in portions.per_cut[stage - 1]) if stage else 0
    end = max(b for b, _ in portions.per_cut[stage]) if stage < len(portions.per_cut) else last
    return start, end


def _whole_rounds(sets: list[tuple[tuple[int, ...], float]], period: int) -> list[tuple[tuple[int, ...], float]]:
    """Round weights to integer fractions of a round; sets with weight 0 are left out."""
    counts = round_robin_counts([weight for _, weight in sets], period=period)
    total = sum(counts)
    return [(cuts, number / total) for (cuts, _), number in zip(sets, counts, strict=True) if number]


def rotated(problem: Problem, pipeline: PlannedPipeline) -> PlannedPipeline | None:
    """Return the pipeline with several cut sets in rotation; None if this is impossible or no better than one set."""
    stages = pipeline.stages
    if problem.setting.trains or not 2 <= len(stages) <= _MAX_STAGES:
        return None
    names = problem.profile.cuts
    cuts = [names.index(name) + 1 for name in pipeline.cut_sets[0].cuts]
    numbers = [problem.numbers[stage.device] for stage in stages]
    bounds = [0, *cuts, problem.num_units]

    def holds(stage: int, start: int, end: int) -> bool:
        return _union_fits(problem, numbers[stage], (start, bounds[stage]), (bounds[stage + 1], end))

    sets = rotate(_boundary_costs(problem, numbers), cuts, holds=holds)
    if len(sets) < 2:
        return None
    cut_sets = tuple(CutSet(cuts=tuple(names[b - 1] for b in chosen), weight=weight) for chosen, weight in sets)
    return PlannedPipeline(stages=stages, cut_sets=cut_sets)


def _boundary_costs(problem: Problem, numbers: Sequence[int]) -> BoundaryCosts:
    terms = [problem.terms(number) for number in numbers]
    cpu = [t.pairs()[0] for t in terms]
    crossing: list[Vector] = []
    if any(device.bandwidth_bytes_per_s for device in problem.devices) or problem.cluster.links:
        crossing = [problem.costs.crossing * problem.wire_s(a, b) for a, b in pairwise(numbers)]
    return BoundaryCosts(starts=[first for first, _ in cpu], ends=[last for _, last in cpu], crossing=crossing)


def _union_fits(problem: Problem, number: int, starts: tuple[int, int], ends: tuple[int, int]) -> bool:
    """Return True if a device can hold all units of a stage if its cuts move within these boundaries."""
    first, last = problem.terms(number).memory
    need = float(problem.costs.held_bytes[min(starts), max(ends)])
    need += float(first[min(starts) : max(starts) + 1].max() + last[min(ends) : max(ends) + 1].max())
    return need <= problem.devices[number].memory_bytes
