"""A delay: all layers train for some epochs before a policy decides."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.elastic.freezing.history import EpochRecord, FreezePolicy
from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class Delayed:
    """Another policy's numbers, as if the training had begun `num_epochs` later; until then nothing is frozen.

    The inner policy does not see those epochs. In them the first layers, which every policy freezes first, can adapt to
    the new task.

    Example:
        Delayed(ClosedForm(1 / 3), num_epochs=1)  # of 12 layers 0, 0, 4, 7, 9, 10, 11, 11, 12

    Raises `UsageError` for less than one epoch.
    """

    policy: FreezePolicy
    num_epochs: int = 1

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise UsageError(
                f"the delay of freezing must be at least 1 epoch; got {self.num_epochs}; leave the delay out"
            )

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return the number of leading layers frozen in the next epoch."""
        if len(history) < self.num_epochs:
            return 0
        return self.policy.frozen_layers(history[self.num_epochs :], num_layers)
