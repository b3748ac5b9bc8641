"""Freezing up to the layer whose gradient norm changes least, as in PipeTransformer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from penstock.elastic.freezing.history import EpochRecord, norms_of, relative_change
from penstock.elastic.freezing.share import check_share, most_frozen


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """The rule of PipeTransformer (He et al., ICML 2021, https://arxiv.org/abs/2102.03161), never unfreezing.

        L_t = min(L_{t-1} + alpha (L - L_{t-1}),  argmin over l = L_{t-1} .. L-1 of measure(l))

    The measure is that of its authors' code: the relative change of a layer's gradient norm since the epoch before.
    After the first epoch, it is the norm itself. Layers up to and including the argmin are frozen: without it, a first
    layer that converges first would never be frozen. The bound is rounded up, so that the last layers are reached. If a
    norm is not finite, nothing more is frozen.

    Example:
        GradientNorms(alpha=1 / 4).frozen_layers(history, num_layers=12)

    Raises `UsageError` for an alpha that is not between 0 and 1, and for epochs without a norm for each layer.
    """

    alpha: float | Fraction = 1 / 3

    def __post_init__(self) -> None:
        check_share(self.alpha)

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        if not history:
            return 0
        frozen = history[-1].frozen_layers
        if frozen >= num_layers:
            return frozen
        measures = _measures(history, num_layers)[frozen:]
        if not all(map(math.isfinite, norms_of(history[-1], num_layers)[frozen:])) or not math.isfinite(min(measures)):
            return frozen
        converged = frozen + measures.index(min(measures)) + 1
        return min(most_frozen(frozen, self.alpha, num_layers), converged)


def _measures(history: Sequence[EpochRecord], num_layers: int) -> list[float]:
    now = norms_of(history[-1], num_layers)
    if len(history) == 1:
        return list(now)
    return [relative_change(a, b) for a, b in zip(norms_of(history[-2], num_layers), now, strict=True)]
