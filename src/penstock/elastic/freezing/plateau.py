"""Freezing of leading layers whose gradient norms have been stable for some epochs."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, takewhile

from penstock.elastic.freezing.history import EpochRecord, norms_of, relative_change
from penstock.elastic.freezing.share import check_share, most_frozen
from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class Plateau:
    """The leading run of trained layers that are all stable, of which one epoch may freeze the share alpha.

    A layer is stable if its gradient norm changed by at most `threshold`, relative to the epoch before, in each of the
    last `patience` epochs; it was trained in all of them and in the one before. A layer that still changes prevents
    freezing of those after it. Never unfreezes.

    Raises `UsageError` for arguments out of range, and for epochs without a norm for each layer.
    """

    patience: int = 2
    threshold: float = 0.05
    alpha: float | Fraction = 1 / 3

    def __post_init__(self) -> None:
        check_share(self.alpha)
        if self.patience < 1:
            raise UsageError(f"patience must be at least 1 epoch; got {self.patience}; use 2")
        if not 0 < self.threshold < 1:
            raise UsageError(
                f"threshold, a relative change of gradient norms, must be between 0 and 1; got {self.threshold}; use "
                "0.05"
            )

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        if not history:
            return 0
        frozen = history[-1].frozen_layers
        last = history[-self.patience - 1 :]
        if len(last) <= self.patience:
            return frozen
        norms = [norms_of(record, num_layers) for record in last]

        def stands_still(layer: int) -> bool:
            trained = all(record.frozen_layers <= layer for record in last)
            return trained and all(relative_change(a[layer], b[layer]) <= self.threshold for a, b in pairwise(norms))

        run = sum(1 for _ in takewhile(stands_still, range(frozen, num_layers)))
        return min(most_frozen(frozen, self.alpha, num_layers), frozen + run)
