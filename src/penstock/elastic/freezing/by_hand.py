"""Freezing by the user's numbers for each epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.elastic.freezing.history import EpochRecord
from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class ByHand:
    """Numbers of frozen layers in epoch 0, 1, 2 and so on; the last number stays. They may also decrease.

    >>> ByHand([0, 4, 7]).frozen_layers([], 12)
    0

    Raises `UsageError` for an empty list, and for values that are not integers of at least 0.
    """

    layers: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in self.layers):
            raise UsageError(
                "the layers frozen by hand must be one number of at least 0 for each epoch; got "
                f"{list(self.layers)}; write them like 0,4,7"
            )

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:  # noqa: ARG002 -- not checked here
        """Return the number of leading layers frozen in the next epoch."""
        return self.layers[min(len(history), len(self.layers) - 1)]
