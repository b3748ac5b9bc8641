"""Division of a line of units into contiguous stages.

Boundary `b` is between units `b - 1` and `b`. All functions take plain numbers and return boundaries, so they are
independent of models and fast to test.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CutError
from penstock.text import counted

# tolerance: sums of floats in another order differ in the last bits
_ROUNDING = 1e-12
_Matrix: TypeAlias = NDArray[np.float64]


def balanced(
    work: Sequence[float], crossing_bytes: Sequence[int], num_stages: int, *, work_per_byte: float = 0.0
) -> list[int]:
    """Minimize the largest stage; among ties, minimize the crossing bytes.

    `crossing_bytes[b]` is the number of bytes that cross boundary `b`, for `b` from 0 to `len(work)`. Every byte costs
    `work_per_byte` in the stages on both sides, for sending and receiving.

    >>> balanced([1, 1, 1, 3], [0, 1, 1, 1, 0], 2)
    [3]

    Raises `CutError` for more stages than units.
    """
    return smallest_crossing(work, crossing_bytes, num_stages, slack=0.0, work_per_byte=work_per_byte)


def smallest_crossing(
    work: Sequence[float], crossing_bytes: Sequence[int], num_stages: int, *, slack: float = 0.10,
    work_per_byte: float = 0.0,
) -> list[int]:  # fmt: skip
    """Minimize the crossing bytes among divisions whose largest stage is within `slack` of the best.

    >>> smallest_crossing([1, 1, 1, 1], [0, 9, 9, 1, 0], 2, slack=0.5)
    [3]

    Raises `CutError` for more stages than units.
    """
    check_stages(len(work), num_stages)
    costs = stage_costs(work, crossing_bytes, work_per_byte)
    limit = _smallest_largest(costs, num_stages) * (1 + slack)
    return _fewest_bytes(costs <= limit * (1 + _ROUNDING), crossing_bytes, num_stages)


def smallest_largest(work: Sequence[float], num_stages: int) -> float:
    """Return the work of the largest stage in the best division; raises `CutError` for more stages than units."""
    check_stages(len(work), num_stages)
    return _smallest_largest(stage_costs(work, [0] * (len(work) + 1), 0.0), num_stages)


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
        if filled and filled + size > threshold * (1 + _ROUNDING) and len(boundaries) < num_stages - 1:
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


def stage_costs(work: Sequence[float], crossing_bytes: Sequence[int], work_per_byte: float) -> _Matrix:
    """Return the cost of every possible stage by start (row) and end (column); infinite if empty."""
    prefix = np.array([0.0, *accumulate(work)])
    ends = np.array(crossing_bytes, dtype=np.float64) * work_per_byte
    costs: _Matrix = prefix[None, :] - prefix[:, None] + ends[None, :] + ends[:, None]
    costs[np.tril_indices(len(prefix))] = math.inf
    return costs


def _smallest_largest(costs: _Matrix, num_stages: int) -> float:
    """Return the smallest possible largest stage, by dynamic programming over the number of stages."""
    best = costs[0]
    for _ in range(1, num_stages):
        best = np.maximum(best[:, None], costs).min(axis=0)
    return float(best[-1])


def _fewest_bytes(fits: NDArray[np.bool_], crossing_bytes: Sequence[int], num_stages: int) -> list[int]:
    """Choose boundaries with the fewest bytes such that every stage fits, by the same dynamic programming."""
    crossing = np.array(crossing_bytes, dtype=np.float64)
    best = np.where(fits[0], 0.0, math.inf)
    choices: list[NDArray[np.intp]] = []
    for _ in range(1, num_stages):
        following = np.where(fits, (best + crossing)[:, None], math.inf)
        choices.append(following.argmin(axis=0))
        best = following.min(axis=0)
    boundaries: list[int] = []
    end = fits.shape[0] - 1
    for choice in reversed(choices):
        end = int(choice[end])
        boundaries.append(end)
    return boundaries[::-1]
