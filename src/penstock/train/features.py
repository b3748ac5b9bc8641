"""Interfaces of extensions that change a training run: epoch followers, cached outputs of frozen layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from penstock import trees

if TYPE_CHECKING:
    from penstock.train.arrangement import Arrangement


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
class LoadedBatch:
    """A batch from a loader: the samples of all replicas together, and the samples of the next batch.

    `placed` is the placement for which the rows were split, None if a step has to load them again; `place` the epoch
    and the batch's number in the epoch.
    `short` is set if the batch may have few rows.
    """

    samples: Sequence[int]
    following: Sequence[int] | None
    leaves: Sequence[tuple[Tensor, int | None]]  # the tensors, with their version counters
    loader: "RowSource"
    placed: "Arrangement | None"
    place: tuple[int, int]
    short: bool

    @classmethod
    def of(
        cls, loaded: Any, samples: Sequence[int], following: Sequence[int] | None, loader: "RowSource",
        placed: "Arrangement | None", place: tuple[int, int], *, short: bool,
    ) -> "LoadedBatch":  # fmt: skip
        """Record a batch that is passed to the user's loop."""
        leaves = [(tensor, _version(tensor)) for tensor in trees.tensors(loaded)]
        return cls(samples, following, leaves, loader, placed, place, short)

    def places(self, inputs: Any) -> "InputPlaces | None":
        """Return the positions of the inputs among the loaded tensors; None unless the tensors are unchanged.

        A batch that the loop has changed does not match the cache. Inference-mode tensors, which have no version
        counter, are treated as changed.
        """
        known = {
            id(leaf): place for place, (leaf, version) in enumerate(self.leaves)
            if version is not None and _version(leaf) == version
        }  # fmt: skip
        given = list(trees.leaves(inputs))
        tensors = [index for index, leaf in enumerate(given) if isinstance(leaf, Tensor)]
        found = {index: place for index in tensors if (place := known.get(id(given[index]))) is not None}
        others = [None if index in found else leaf for index, leaf in enumerate(given)]
        if not tensors or len(found) < len(tensors):
            return None
        return InputPlaces(trees.structure(inputs), found, others, trees.mapped(lambda _: None, inputs))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class InputPlaces:
    """Positions of the model's inputs among a loader's tensors, learned from a step of the loop."""

    structure: Any
    places: Mapping[int, int]  # index of each input tensor among the loaded tensors
    others: Sequence[Any]  # non-tensor values of the inputs
    containers: Any = field(compare=False)  # structure of the inputs, without tensors

    def inputs_of(self, loaded: Any) -> Any:
        """Return the inputs for a loaded batch."""
        tensors = trees.tensors(loaded)
        leaves = iter([
            tensors[self.places[index]] if index in self.places else value for index, value in enumerate(self.others)
        ])  # fmt: skip
        return trees.mapped(lambda _: next(leaves), self.containers)


class RowSource(Protocol):
    """The methods of a loader that repeating a step needs."""

    def load_own(self, samples: Sequence[int], *, short: bool) -> Any:
        """Load this process's rows of a batch for the current placement."""

    def rewind(self, place: tuple[int, int]) -> None:
        """Set the position to an epoch and one of its batches (a collective call)."""

    def take(self) -> Any:
        """Load the next batch outside of any iteration."""


@dataclass(frozen=True, slots=True)
class JoinPlace:
    """The epoch and the batch at which a newcomer continues; `loads` is set if the other ranks are loading it."""

    epoch: int
    batch: int
    loads: bool


class Together(Protocol):
    """Exchange of objects between processes, some of which may be lost or join."""

    def together(
        self, work: Callable[[], dict[str, Any]], undo: Callable[[], None] = lambda: None, *, admits: bool = False
    ) -> list[dict[str, Any]]:
        """Run `work` and return the objects of all ranks; `work` is repeated if the group has changed.

        `work` must contain all sends and receives of the call; `undo` reverts the changes of a failed attempt. With
        `admits`, newcomers join before the call.
        """

    def place(self) -> "JoinPlace | None":
        """Return, once, the place at which a newcomer continues."""

    def saw_checkpoint(self, folder: Any) -> None:
        """Record a complete checkpoint."""

    def close(self) -> None:
        """Stop following new groups."""


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
