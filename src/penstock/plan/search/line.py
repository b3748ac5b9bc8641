"""Search for the best cuts of a line of units, by dynamic programming stage by stage.

    best[stage, end]  =  min over the stage's start of  join( best[stage before, start], length[start, end] )

With a maximum as `join` the result is the largest stage, with a sum the whole path. A stage's matrix has a row for each
boundary where it may start and a column for each where it may end; its columns are the rows of the next stage. The
first stage starts at its first row, and the last ends at its last column.
"""

from collections.abc import Sequence

import numpy as np

from penstock.plan.cost.stage_cost import Vector

# sums of floats in another order differ in the last bits
ROUNDING = 1 + 1e-12


def best_path(lengths: Sequence[Vector], join: np.ufunc) -> tuple[float, list[int]]:
    """Minimize the joined lengths of the stages; return the minimum, and the column at which each but the last ends.

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
