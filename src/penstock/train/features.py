"""The seams to what changes a training while it goes on: who follows its epochs, and what frozen layers put out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from penstock import trees

if TYPE_CHECKING:
    from penstock.train.arrangement import Arrangement


class Features(Protocol):
    """The outputs of the layers that do not run, by sample; every process asks for every batch, in the same order."""

    def outputs(self, batch: Sequence[int], following: Sequence[int] | None) -> list[Tensor]:
        """Return what crosses into the first stage that runs, for this process's rows of a batch.

        Begins to fetch those of the `following` batch, if there is one. Samples are numbers of the data set's rows,
        those of all replicas together.
        """

    def close(self) -> None:
        """Let go of what has been fetched and is not needed any more."""


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch as a loader gave it: the samples of all replicas together, and those of the batch after it.

    `placed` is the arrangement in which its rows were shared out, `place` the epoch and the batch's number in it, and
    `short` says that it may have few rows.
    """

    samples: Sequence[int]
    following: Sequence[int] | None
    leaves: Sequence[tuple[Tensor, int | None]]  # the tensors, with how often each had been written to
    loader: "Rows"
    placed: "Arrangement"
    place: tuple[int, int]
    short: bool

    @classmethod
    def of(
        cls, loaded: Any, samples: Sequence[int], following: Sequence[int] | None, loader: "Rows",
        placed: "Arrangement", place: tuple[int, int], *, short: bool,
    ) -> "LoadedBatch":  # fmt: skip
        """Remember what is given to the user's loop."""
        leaves = [(tensor, _version(tensor)) for tensor in trees.tensors(loaded)]
        return cls(samples, following, leaves, loader, placed, place, short)

    def places(self, inputs: Any) -> "InputPlaces | None":
        """Return where inputs stand in what was loaded; None unless they are as they were loaded.

        What a loop has changed is not what has been cached. Tensors of inference mode, which do not count what is
        written to them, are taken for changed.
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
    """Where the inputs of the model stand among the tensors that a loader gives: learnt from a step of the loop."""

    structure: Any
    places: Mapping[int, int]  # the number that each tensor of the inputs has among the loaded ones
    others: Sequence[Any]  # the inputs' values that are no tensors
    containers: Any = field(compare=False)  # inputs without their leaves

    def inputs_of(self, loaded: Any) -> Any:
        """Return the inputs for a batch that was loaded."""
        tensors = trees.tensors(loaded)
        leaves = iter([
            tensors[self.places[index]] if index in self.places else value for index, value in enumerate(self.others)
        ])  # fmt: skip
        return trees.mapped(lambda _: next(leaves), self.containers)


class Rows(Protocol):
    """A loader, as whoever repeats a step needs it."""

    def load_own(self, samples: Sequence[int], *, short: bool) -> Any:
        """Load this process's rows of a batch, as the training is arranged now."""

    def rewind(self, place: tuple[int, int]) -> None:
        """Go back, or on, to an epoch and a batch of it; every process calls this."""

    def take(self) -> Any:
        """Load the next batch outside of any loop."""


class Together(Protocol):
    """How processes tell each other of what they did, where some may be lost, and others come."""

    def together(
        self, work: Callable[[], dict[str, Any]], undo: Callable[[], None] = lambda: None, *, takes_in: bool = False
    ) -> list[dict[str, Any]]:
        """Work, and return what every process tells of it; the work is done again where the group has changed.

        It moves no tensors once it has told; `undo` changes back what it has changed, where that does not count. Where
        it `takes_in`, others join before it.
        """

    def place(self) -> tuple[int, int] | None:
        """Return, once, the epoch and the batch at which a process that has come goes on."""

    def saw_checkpoint(self, folder: Any) -> None:
        """Take note of a checkpoint that is whole."""

    def close(self) -> None:
        """Go on in no other group."""


class Follower(Protocol):
    """Sees a training's epochs and gradients, and may change its arrangement between two epochs."""

    def begin_epoch(self, loader: Any) -> None:
        """See that a loader begins an epoch, or goes on in one; every process comes here at the same step."""

    def end_epoch(self, loader: Any) -> None:
        """See that a loader's last batch has been trained on."""

    def saw_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """See the gradients of a batch's mean, of the parameters held here."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON can hold it; every process calls this, and gets the same."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Bring the training to where a checkpoint was, before its tensors are read."""

    def close(self, *, finished: bool) -> None:
        """Let go of what is not needed any more; a training that has not `finished` may be gone on with."""
