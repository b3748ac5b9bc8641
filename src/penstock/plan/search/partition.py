"""Division of a line of units into contiguous stages.

Boundary `b` is between units `b - 1` and `b`. All functions take plain numbers and return boundaries, so they are
independent of models and fast to test.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from penstock.errors import CutError
from penstock.plan.cost.stage_cost import Vector
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
    work: Sequence[float], crossing_bytes: Sequence[int], num_stages: int, *, slack: float = 0.0,
    work_per_byte: float = 0.0,
) -> list[int]:  # fmt: skip
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
