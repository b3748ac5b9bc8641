"""Division of a line of units into stages: one stretch of the line for each device, or several for interleaved 1F1B.

Boundary `b` is between units `b - 1` and `b`. Functions that divide into contiguous stages take plain numbers and
return boundaries, so they are independent of models and fast to test. Interleaved cuts balance devices, not stages:

    interleaved stages      device 0: stages 0 and 2     device 1: stages 1 and 3

The load of a device is the sum over its stages. Stage by stage from the start of the model, the search keeps every
state (the end of the stage, and the load of each device so far) that can still improve on the best known division. Cuts
move within windows around the best known cuts, and windows grow until there is no improvement. If windows cover the
whole line and no states were dropped, the result is optimal; if there are too many states, only the most promising are
kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CutError
from penstock.plan.cost.problem import Division, Placed, Problem
from penstock.plan.cost.stage_cost import Vector
from penstock.plan.cost.training_step import interleaved_memory
from penstock.text import counted

# sums of floats in another order differ in the last bits
ROUNDING = 1 + 1e-12


def best_path(lengths: Sequence[Vector], join: np.ufunc) -> tuple[float, list[int]]:
    """Minimize the joined lengths of the stages; return the minimum, and the column at which each but the last ends.

        best[stage, end]  =  min over the stage's start of  join( best[stage before, start], length[start, end] )

    With a maximum as `join` this is the largest stage, with a sum the whole path. A stage's matrix has a row for each
    boundary where it may start and a column for each where it may end, which are the rows of the next stage.

    >>> best_path([np.array([[1.0, 2.0]]), np.array([[5.0], [3.0]])], np.maximum)
    (3.0, [1])

    The columns are meaningless if the minimum is infinite.
    """
    best, choices = lengths[0][0], []
    for length in lengths[1:]:
        following = join(best[:, None], length)
        choices.append(following.argmin(axis=0))
        best = following.min(axis=0)
    ends = [len(best) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(best[-1]), ends[:0:-1]


def best_cuts(costs: Sequence[Vector], lengths: Sequence[Vector], *, slack: float = 0.0) -> list[int] | None:
    """Minimize the largest cost and, among paths within `slack` of it, the sum of the lengths.

    Returns the column at which each stage but the last ends; None if every path has an infinite cost.
    """
    limit = best_path(costs, np.maximum)[0] * (1 + slack) * ROUNDING
    if not limit < np.inf:
        return None
    within = [np.where(cost <= limit, length, np.inf) for cost, length in zip(costs, lengths, strict=True)]
    return best_path(within, np.add)[1]


def balanced(
    work: Sequence[float],
    crossing_bytes: Sequence[int],
    num_stages: int,
    *,
    slack: float = 0.0,
    work_per_byte: float = 0.0,
) -> list[int]:
    """Minimize the largest stage and, among divisions within `slack` of it, the crossing bytes.

    `crossing_bytes[b]` is the number of bytes that cross boundary `b`, for `b` from 0 to `len(work)`. Every byte costs
    `work_per_byte` in the stages on both sides, for sending and receiving.

    >>> balanced([1, 1, 1, 3], [0, 1, 1, 1, 0], 2)
    [3]
    >>> balanced([1, 1, 1, 1], [0, 9, 9, 1, 0], 2, slack=0.5)
    [3]

    Raises `CutError` for more stages than units.
    """
    check_stages(len(work), num_stages)
    costs = stage_costs(work, crossing_bytes, work_per_byte)
    crossing = np.broadcast_to(np.array(crossing_bytes, dtype=np.float64)[:, None], costs.shape)
    cuts = best_cuts([costs] * num_stages, [crossing] * num_stages, slack=slack)
    if cuts is None:
        raise AssertionError("no division found despite enough units")
    return cuts


def evenly(starts: Sequence[int], num_stages: int) -> list[int]:
    """Assign the same number of blocks to every stage; if they do not divide evenly, the first stages get one more.

    `starts` are the boundaries before each block.

    >>> evenly([0, 2, 4, 6, 8], 2)
    [6]

    Raises `CutError` for more stages than blocks.
    """
    if num_stages > len(starts):
        raise CutError(
            f"{num_stages} stages of whole blocks need as many blocks; got {len(starts)}; use fewer stages or the "
            "policy 'balanced'"
        )
    each, more = divmod(len(starts), num_stages)
    counts = accumulate(each + (stage < more) for stage in range(num_stages - 1))
    return [starts[count] for count in counts]


def fill(sizes: Sequence[float], num_stages: int) -> list[int]:
    """Fill stages in order up to the average size, as PiPPy's split_into_equal_size does.

    A stage ends before the first item that would take it above `sum(sizes) / num_stages`; the last stage takes the
    rest. Returns boundaries between items, fewer than requested if items are too large.

    >>> fill([3, 1, 1, 3], 2)
    [2]
    """
    threshold = sum(sizes) / num_stages
    boundaries: list[int] = []
    filled = 0.0
    for index, size in enumerate(sizes):
        if filled and filled + size > threshold * ROUNDING and len(boundaries) < num_stages - 1:
            boundaries.append(index)
            filled = 0.0
        filled += size
    return boundaries


def stage_sums(values: Sequence[float], boundaries: Sequence[int]) -> list[float]:
    """Add up values per stage.

    >>> stage_sums([1, 2, 3, 4], [1])
    [1, 9]
    """
    bounds = [0, *boundaries, len(values)]
    return [sum(values[start:stop]) for start, stop in pairwise(bounds)]


def check_stages(num_units: int, num_stages: int) -> None:
    """Raise `CutError` unless every stage can have at least one unit."""
    if num_stages < 1:
        raise CutError(f"the number of stages must be at least 1; got {num_stages}")
    if num_stages > num_units:
        raise CutError(
            f"{num_stages} stages need at least {counted(num_stages - 1, 'cut')}, but this model allows "
            f"{num_units - 1}; use at most {counted(num_units, 'stage')}"
        )


def stage_costs(work: Sequence[float], crossing_bytes: Sequence[int], work_per_byte: float) -> Vector:
    """Return the cost of every possible stage by start (row) and end (column); infinite if empty."""
    prefix = np.array([0.0, *accumulate(work)])
    ends = np.array(crossing_bytes, dtype=np.float64) * work_per_byte
    costs: Vector = prefix[None, :] - prefix[:, None] + ends[None, :] + ends[:, None]
    costs[np.tril_indices(len(prefix))] = math.inf
    return costs


# devices whose loads differ by less than this count as equally busy: then more equal stages are better
SLACK = 0.003
# maximum number of states kept per stage
_WIDTH = 3000
# numbers of stages per device to try; more stages have a smaller bubble but more messages
_STAGES_EACH = (2, 3)
# up to this number of devices, subsets are tried too
_FEW = 12
_Places: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class InterleavedCuts:
    """Boundaries between stages, the load of the busiest device, and the cost of the largest stage."""

    cuts: tuple[int, ...]
    busiest: float
    largest: float


def interleave(costs: Sequence[Vector], places: Sequence[int], *, slack: float = 0.0) -> InterleavedCuts | None:
    """Choose ends of stages that minimize the busiest device's load and, within `slack` of it, the largest stage.

    `costs[stage][a, b]` is the cost of the units from boundary `a` to `b` if they are this stage, on its device;
    infinite if impossible. `places[stage]` is the device. Returns None if there is no solution.

    Example:
        interleave([costs] * 4, [0, 1, 0, 1]).cuts
    """
    search = _Interleaving(costs, places, slack)
    best = search.first()
    if best is None:
        return None
    reach, last = 1, search.last
    while True:
        found = search.around(best, reach)
        better = found is not None and found != best and search.prefers(found, best)
        if found is not None and better:
            best = found
        if not better and (reach >= last or search.thinned):
            return best
        reach *= 1 if better else 2


def balanced_devices(
    work: Sequence[float],
    crossing_bytes: Sequence[int],
    num_stages: int,
    *,
    places: Sequence[int],
    work_per_byte: float = 0.0,
) -> list[int]:
    """Minimize the busiest device's load, then the largest stage.

    `places` are the devices of the stages; the other arguments and the result are as for `partition.balanced`.

    >>> balanced_devices([1, 1, 1, 3, 1, 1], [0] * 7, 4, places=[0, 1, 0, 1])
    [1, 3, 4]

    Raises `CutError` for more stages than units.
    """
    check_stages(len(work), num_stages)
    counts = [len(list(group)) for _, group in groupby(places)]
    if len(counts) == len(set(places)) and (cuts := _side_by_side(work, crossing_bytes, counts, work_per_byte)):
        return cuts
    found = interleave([stage_costs(work, crossing_bytes, work_per_byte)] * num_stages, places, slack=SLACK)
    if found is None:
        raise AssertionError("no division found despite enough units")
    return list(found.cuts)


def _side_by_side(
    work: Sequence[float], crossing_bytes: Sequence[int], counts: Sequence[int], work_per_byte: float
) -> list[int] | None:
    """Divide the line among devices whose stages are adjacent, then each device's part into its stages.

    Two stages of one device exchange no messages. Returns None if a part has too few units.
    """
    outer = balanced(work, crossing_bytes, len(counts), work_per_byte=work_per_byte)
    cuts = []
    for count, (start, end) in zip(counts, pairwise([0, *outer, len(work)]), strict=True):
        if end - start < count:
            return None
        cuts += [start + cut for cut in balanced(work[start:end], crossing_bytes[start : end + 1], count)]
        cuts.append(end)
    return cuts[:-1]


class _Interleaving:
    def __init__(self, costs: Sequence[Vector], places: Sequence[int], slack: float) -> None:
        self.costs, self.places, self.slack = list(costs), list(places), slack
        self.num_devices, self.last = max(places) + 1, len(costs[0]) - 1
        # minimum total cost of the stages from each stage on, from every boundary to the end
        self.rest = [np.where(np.arange(self.last + 1) == self.last, 0.0, math.inf)]
        for cost in reversed(self.costs):
            self.rest.insert(0, (cost + self.rest[0][None, :]).min(axis=1))
        self.thinned = False  # True if states were dropped in the last search
        self.least = math.inf  # load of the busiest device in the best division so far

    def first(self) -> InterleavedCuts | None:
        """Return the division with the smallest largest stage."""
        largest, cuts = best_path(self.costs, np.maximum)
        return self._cuts(tuple(cuts)) if largest < math.inf else None

    def prefers(self, one: InterleavedCuts, other: InterleavedCuts) -> bool:
        """Return True if `one` is better than `other`."""
        limit = self.least * (1 + self.slack) * ROUNDING
        if max(one.busiest, other.busiest) > limit:
            return one.busiest < other.busiest
        return (one.largest, one.busiest) < (other.largest, other.busiest)

    def around(self, known: InterleavedCuts, reach: int) -> InterleavedCuts | None:
        """Return the best division with cuts within `reach` of known cuts."""
        windows = [np.arange(1)]
        windows += [np.arange(max(1, c - reach), min(self.last - 1, c + reach) + 1) for c in known.cuts]
        windows.append(np.array([self.last]))
        self.thinned = False
        at, loads, largest = np.zeros(1, dtype=np.intp), np.zeros((1, self.num_devices)), np.zeros(1)
        steps: list[tuple[_Places, _Places]] = []
        for stage, (here, ends) in enumerate(pairwise(windows)):
            cost = self.costs[stage][here[at]][:, ends]
            come, end = np.nonzero(cost < math.inf)
            taken = cost[come, end]
            loads = loads[come]
            loads[:, self.places[stage]] += taken
            largest = np.maximum(largest[come], taken)
            kept = self._promising(stage, ends[end], loads, largest)
            at, loads, largest = end[kept], loads[kept], largest[kept]
            steps.append((come[kept], ends[at]))
        if not len(at):
            return None
        busiest = loads.max(axis=1)
        self.least = min(self.least, float(busiest.min()))
        within = np.flatnonzero(busiest <= max(self.least * (1 + self.slack), float(busiest.min())) * ROUNDING)
        state = int(within[np.lexsort((busiest[within], largest[within]))[0]])
        cuts = []
        for come, ends in reversed(steps):
            cuts.append(int(ends[state]))
            state = int(come[state])
        return self._cuts(tuple(cuts[:0:-1]))

    def _promising(self, stage: int, ends: _Places, loads: Vector, largest: Vector) -> _Places:
        """Choose the states that may match the best known division; if there are too many, those with the most room."""
        limit = self.least * (1 + self.slack) * ROUNDING
        room = (limit - loads).sum(axis=1)
        rest = self.rest[stage + 1][ends]
        kept = np.flatnonzero((loads.max(axis=1) <= limit) & (rest <= room * ROUNDING))
        if len(kept) <= _WIDTH:
            return kept
        self.thinned = True
        done, whole = (
            np.bincount(self.places[:count], minlength=self.num_devices) for count in (stage + 1, len(self.places))
        )
        ahead = (loads[kept] - limit * done / whole).max(axis=1) / max(limit, 1e-300)
        tight = np.maximum(ahead, rest[kept] / np.maximum(room[kept], 1e-300) - 1)
        return kept[np.lexsort((largest[kept], tight))[:_WIDTH]]

    def _cuts(self, cuts: tuple[int, ...]) -> InterleavedCuts:
        stages = [float(cost[a, b]) for cost, (a, b) in zip(self.costs, pairwise((0, *cuts, self.last)), strict=True)]
        loads = [0.0] * self.num_devices
        for place, seconds in zip(self.places, stages, strict=True):
            loads[place] += seconds
        self.least = min(self.least, max(loads))
        return InterleavedCuts(cuts, max(loads), max(stages))


def interleaved_divisions(problem: Problem) -> list[Division]:
    """Return good pipelines that fit, with several stages per device, for each number of devices.

    Devices are in order. If not all devices are used, the fastest are; with more than a dozen devices all are used.
    Memory is checked after the cuts are chosen.

    Example:
        division = interleaved_divisions(problem)[0]
    """
    fastest = sorted(range(len(problem.devices)), key=lambda number: -problem.devices[number].speed)
    found = []
    for num_devices in range(2 if len(fastest) <= _FEW else len(fastest), len(fastest) + 1):
        numbers = sorted(fastest[:num_devices])
        costs = {number: _costs(problem, number) for number in numbers}
        for each in _STAGES_EACH:
            holders = numbers * each
            if len(holders) > problem.num_units:
                continue
            chosen = interleave([costs[number] for number in holders], list(range(num_devices)) * each, slack=SLACK)
            if chosen is None:
                continue
            bounds = pairwise((0, *chosen.cuts, problem.num_units))
            division = tuple(Placed(number, a, b) for number, (a, b) in zip(holders, bounds, strict=True))
            needs = interleaved_memory(problem, division)
            if all(need <= problem.devices[number].memory_bytes for number, need in needs.items()):
                found.append(division)
    return found


def _costs(problem: Problem, number: int) -> Vector:
    """Return the seconds of every possible stage on a device; infinite if empty."""
    first, last = problem.path_terms(number)
    seconds: Vector = first[:, None] + last[None, :]
    seconds[np.tril_indices(problem.num_units + 1)] = np.inf
    return seconds
