"""Let all layers train for some epochs before a policy decides."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.elastic.freezing.history import EpochRecord, FreezePolicy
from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class Delayed:
    """Another policy's answers, as if the training had begun `num_epochs` later; until then nothing is frozen.

    The inner policy does not see those epochs. They give the first layers, which every policy freezes first, time to
    learn what is new.

    Example:
        Delayed(ClosedForm(1 / 3), num_epochs=1)  # of 12 layers 0, 0, 4, 7, 9, 10, 11, 11, 12

    Raises `UsageError` for less than one epoch.
    """

    policy: FreezePolicy
    num_epochs: int = 1

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise UsageError(f"freezing begins at least 1 epoch later, not {self.num_epochs}; leave the delay out")

    def frozen_layers(self, history: Sequence[EpochRecord], num_layers: int) -> int:
        """Return how many leading layers are frozen in the next epoch."""
        if len(history) < self.num_epochs:
            return 0
        return self.policy.frozen_layers(history[self.num_epochs :], num_layers)
