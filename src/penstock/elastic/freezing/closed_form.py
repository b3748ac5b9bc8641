"""Freezing by epoch number: PipeTransformer's bound alone, independent of the gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from penstock.elastic.freezing.history import EpochRecord
from penstock.elastic.freezing.share import check_share, exact_share


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """ceil(L (1 - (1 - alpha)^t)) layers of L after t finished epochs: a share alpha of the others each time.

    Iterated in real numbers, L_t = L_{t-1} + alpha (L - L_{t-1}) is exactly L (1 - (1 - alpha)^t). Rounded up after
    each epoch, as `most_frozen` does since half a layer cannot be frozen, it is never below the closed form and
    sometimes above it: for 12 layers and a third it has all 12 after 6 epochs, this one after 7.

    >>> [ClosedForm(1 / 3).after(epochs, 12) for epochs in range(8)]
    [0, 4, 7, 9, 10, 11, 11, 12]

    Raises `UsageError` for an alpha that is not between 0 and 1.
    """

    alpha: float | Fraction = 1 / 3

    def __post_init__(self) -> None:
        check_share(self.alpha)

    def after(self, num_epochs: int, num_layers: int) -> int:
        """Return the number of layers frozen after n epochs."""
        return math.ceil(num_layers * (1 - (1 - exact_share(self.alpha)) ** num_epochs))

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        return self.after(len(history), num_layers)
