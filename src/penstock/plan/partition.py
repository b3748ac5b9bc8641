"""Divide a line of units into contiguous stages.

A boundary `b` lies between unit `b - 1` and unit `b`. All functions take plain numbers and give
boundaries, so they are tested in milliseconds and know nothing of models.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from penstock.errors import CutError

# Sums of floats taken in another order differ in the last bits; such differences are not a choice.
_ROUNDING = 1e-12


def balanced(work: Sequence[float], crossing_bytes: Sequence[int], num_stages: int) -> list[int]:
    """Make the largest stage as small as it can be; among equals, let the fewest bytes cross.

    `crossing_bytes[b]` is what crosses boundary `b`, for `b` from 0 to `len(work)`.

    >>> balanced([1, 1, 1, 3], [0, 1, 1, 1, 0], 2)
    [3]

    Raises `CutError` for more stages than units.
    """
    return smallest_crossing(work, crossing_bytes, num_stages, slack=0.0)


def smallest_crossing(
    work: Sequence[float], crossing_bytes: Sequence[int], num_stages: int, *, slack: float = 0.10
) -> list[int]:
    """Let the fewest bytes cross among divisions whose largest stage is within `slack` of the best.

    >>> smallest_crossing([1, 1, 1, 1], [0, 9, 9, 1, 0], 2, slack=0.5)
    [3]

    Raises `CutError` for more stages than units.
    """
    check_stages(len(work), num_stages)
    limit = smallest_largest(work, num_stages) * (1 + slack)
    return _fewest_bytes(_prefix(work), crossing_bytes, num_stages, limit * (1 + _ROUNDING))


def smallest_largest(work: Sequence[float], num_stages: int) -> float:
    """Give the work of the largest stage in the best division.

    Dynamic programming over the number of stages; for a fixed end the best start is where the work
    before it and the work of the last stage meet, found by bisection: O(stages x units x log units).
    """
    check_stages(len(work), num_stages)
    prefix = _prefix(work)
    best = list(prefix)
    for stage in range(1, num_stages):
        following = [math.inf] * len(prefix)
        for end in range(stage + 1, len(prefix)):
            # best[] grows and the last stage shrinks with its start: look where they cross
            start = bisect_left(range(stage, end), True, key=lambda s: best[s] >= prefix[end] - prefix[s])
            for candidate in (stage + start - 1, stage + start):
                if stage <= candidate < end:
                    largest = max(best[candidate], prefix[end] - prefix[candidate])
                    following[end] = min(following[end], largest)
        best = following
    return best[-1]


def evenly(starts: Sequence[int], num_stages: int) -> list[int]:
    """Give every stage the same number of blocks, the first stages one more where they do not divide.

    `starts` are the boundaries before each block.

    >>> evenly([0, 2, 4, 6, 8], 2)
    [6]

    Raises `CutError` for more stages than blocks.
    """
    if num_stages > len(starts):
        raise CutError(
            f"{num_stages} stages of whole blocks need as many blocks, but there are {len(starts)}; "
            "use fewer stages or the policy 'balanced'"
        )
    each, more = divmod(len(starts), num_stages)
    counts = accumulate(each + (stage < more) for stage in range(num_stages - 1))
    return [starts[count] for count in counts]


def fill(sizes: Sequence[float], num_stages: int) -> list[int]:
    """Fill stages one after the other up to the average size, as PiPPy's split_into_equal_size does.

    A stage ends before the first item that would lift it above `sum(sizes) / num_stages`; the last
    stage takes what is left. Gives boundaries between items; there may be fewer than asked for when
    the items are too coarse.

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
    return [sum(values[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]


def check_stages(num_units: int, num_stages: int) -> None:
    """Raise `CutError` unless every stage can have at least one unit."""
    if num_stages < 1:
        raise CutError(f"the number of stages must be at least 1, not {num_stages}")
    if num_stages > num_units:
        raise CutError(
            f"{num_stages} stages need at least {num_stages - 1} cuts, but this model allows {num_units - 1}; "
            f"use at most {num_units} stages"
        )


def _prefix(work: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(work)]


def _fewest_bytes(
    prefix: Sequence[float], crossing_bytes: Sequence[int], num_stages: int, limit: float
) -> list[int]:
    """Choose boundaries with the fewest bytes so that no stage exceeds the limit.

    For each number of stages and each end, the best start lies in the window of starts that keep the
    last stage within the limit; the window's minimum moves along in a deque.
    """
    ends = len(prefix)
    best: list[float] = [0.0 if total <= limit else math.inf for total in prefix]
    choices: list[list[int]] = []
    for stage in range(1, num_stages):
        following = [math.inf] * ends
        choice = [0] * ends
        window: deque[int] = deque()
        for end in range(stage + 1, ends):
            entering = end - 1
            cost = best[entering] + crossing_bytes[entering]
            while window and best[window[-1]] + crossing_bytes[window[-1]] >= cost:
                window.pop()
            window.append(entering)
            while prefix[end] - prefix[window[0]] > limit:
                window.popleft()
                if not window:
                    break
            if window:
                choice[end] = window[0]
                following[end] = best[window[0]] + crossing_bytes[window[0]]
        best = following
        choices.append(choice)
    boundaries: list[int] = []
    end = ends - 1
    for choice in reversed(choices):
        end = choice[end]
        boundaries.append(end)
    return boundaries[::-1]
