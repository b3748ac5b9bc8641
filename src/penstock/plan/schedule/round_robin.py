"""Round-robin: several items share the microbatches of a stream, in an order that all processes know.

The item of a microbatch depends only on its number, so no messages are needed.
"""

import math
from collections.abc import Sequence
from itertools import count

from penstock.errors import PlanError


def round_robin(weights: Sequence[float], *, period: int = 100) -> tuple[int, ...]:
    """Return the order of cut sets for microbatches: microbatch `m` takes `order[m % len(order)]`.

    >>> round_robin([0.5, 0.25, 0.25])
    (0, 1, 2, 0)

    The order is at most `period` long, and as long as needed to approximate the weights best. At every moment each cut
    set is within one microbatch of its share, so that queues between stages absorb the difference: R. Tijdeman, "The
    chairman assignment problem", Discrete Mathematics 32 (1980). Raises `PlanError` for weights that do not add up to
    1.
    """
    counts = round_robin_counts(weights, period=period)
    order: list[int] = []
    given = [0] * len(counts)
    used = [index for index, number in enumerate(counts) if number]
    total = sum(counts)
    # in multiples of 1 / (total * slack), so that rounding has no influence
    slack = max(2 * len(used) - 2, 1)
    for turn in range(1, total + 1):
        backlog = {j: slack * (turn * counts[j] - total * given[j]) for j in used}
        due = [j for j in used if backlog[j] >= total or len(used) == 1]
        # the item whose deadline comes first
        chosen = min(due, key=lambda j: ((slack - 1) * total - backlog[j]) / counts[j])
        given[chosen] += 1
        order.append(chosen)
    return tuple(order)


def round_robin_counts(weights: Sequence[float], *, period: int = 100) -> tuple[int, ...]:
    """Return the number of microbatches per round for each cut set: near the weights, at most `period` in total.

    >>> round_robin_counts([1 / 3, 2 / 3])
    (1, 2)

    Raises `PlanError` for weights that do not add up to 1.
    """
    if not weights or min(weights) < 0 or not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
        raise PlanError(f"weights of cut sets must add up to 1; got {list(weights)}; replan")
    best: tuple[int, ...] = ()
    smallest = math.inf
    for total in range(1, period + 1):
        counts = _nearest(weights, total)
        error = max(abs(number / total - weight) for number, weight in zip(counts, weights, strict=True))
        if error < smallest - 1e-9:
            best, smallest = counts, error
    return best


def _nearest(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Round to integers with this sum; the largest remainders are rounded up."""
    counts = [math.floor(weight * total + 1e-9) for weight in weights]
    remainders = sorted(range(len(weights)), key=lambda j: (counts[j] - weights[j] * total, j))
    for _, index in zip(range(total - sum(counts)), (remainders[n % len(weights)] for n in count()), strict=False):
        counts[index] += 1
    return tuple(counts)
