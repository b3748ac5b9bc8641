"""The share of the layers still trained that may be frozen after one epoch, in exact numbers."""

import math
from fractions import Fraction

from penstock.errors import UsageError

# a float is taken for the fraction with the smallest terms up to this: 0.3333333333333333 for a third
_MAX_DENOMINATOR = 10**6


def check_share(alpha: float | Fraction) -> None:
    """Raise `UsageError` for an alpha that is not between 0 and 1."""
    if not 0 < alpha < 1:
        raise UsageError(
            f"alpha, the share of trained layers that one epoch may freeze, must be between 0 and 1; got {alpha}; "
            "use 1/3"
        )


def exact_share(alpha: float | Fraction) -> Fraction:
    """Return the intended fraction, so that rounding up 12 * (1 - 2/3) gives 4 and not 5."""
    near = Fraction(alpha).limit_denominator(_MAX_DENOMINATOR)
    return near if 0 < near < 1 else Fraction(alpha)


def most_frozen(frozen_layers: int, alpha: float | Fraction, num_layers: int) -> int:
    """Return the largest number of layers to freeze next: those frozen now, and a share of the others, rounded up.

    >>> most_frozen(4, 1 / 3, 12)
    7
    """
    return frozen_layers + math.ceil(exact_share(alpha) * max(0, num_layers - frozen_layers))
