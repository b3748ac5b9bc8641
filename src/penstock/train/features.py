"""Interfaces of extensions that change a training run: epoch followers, cached outputs of frozen layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Features(Protocol):
    """Outputs of skipped layers by sample; every process must request every batch, in the same order."""

    def outputs(self, batch: Sequence[int], following: Sequence[int] | None) -> list[Tensor]:
        """Return the inputs of the first running stage for this process's rows of a batch.

        Starts to prefetch the inputs of the `following` batch, if any. Samples are row numbers of the data set, for all
        replicas together.
        """

    def close(self) -> None:
        """Release prefetched outputs."""


@dataclass(frozen=True, slots=True)
class JoinPlace:
    """The epoch and the batch at which a newcomer continues; `loads` is set if the other ranks are loading it."""

    epoch: int
    batch: int
    loads: bool


class Follower(Protocol):
    """An observer of a run's epochs and gradients that may change the placement between epochs."""

    def begin_epoch(self, loader: Any) -> None:
        """Handle the start or continuation of an epoch; every process calls this at the same step."""

    def end_epoch(self, loader: Any) -> None:
        """Handle the end of an epoch, after its last batch was trained on."""

    def saw_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Handle the gradients of a batch's mean loss, for the parameters held here."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON values, the same on every process (a collective call)."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the follower's state from a checkpoint, before the tensors are read."""

    def close(self) -> None:
        """Release resources."""
