"""Batches that loaders have yielded, and the rows of a step, which are reloaded if the placement changes in it."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from penstock import trees
from penstock.errors import DeviceLost, UsageError
from penstock.graph.cuts import TrainingPart
from penstock.graph.graph import Graph
from penstock.train.arrangement import Arrangement
from penstock.train.batches import bind
from penstock.train.data_order import Iteration, Place
from penstock.train.row_exchange import RowExchange, StepInputs

_YIELDED = 8  # iterations whose last batch is remembered, since a validation loader may run before the step


class RowSource(Protocol):
    """The methods of a loader that a step needs."""

    def load_own(self, samples: Sequence[int], *, short: bool) -> Any:
        """Load this process's rows of a batch for the current placement."""

    def rewind(self, place: Place) -> None:
        """Set the position to an epoch and one of its batches (a collective call)."""

    def take(self) -> "tuple[Any, LoadedBatch]":
        """Load the next batch outside of any iteration."""

    def saw_step(self, iteration: Iteration) -> None:
        """Record that a step trained on a batch of an iteration."""


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
        leaves = iter(
            [tensors[self.places[index]] if index in self.places else value for index, value in enumerate(self.others)]
        )
        return trees.mapped(lambda _: next(leaves), self.containers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedBatch:
    """A batch of a loader's `iteration`: the samples of all replicas together, and those of the `following` batch.

    `placed` is the placement for which the rows were split, None if a step has to load them again; `place` the epoch
    and the batch's number in the epoch. `short` is set if the batch may have few rows, `followed` if the loader is the
    one of an elastic training, and `repeats` if a step may have to load the rows again.
    """

    loaded: Sequence[tuple[weakref.ref[Tensor], int | None]]  # the tensors, with their version counters
    loader: RowSource
    iteration: Iteration | None
    samples: Sequence[int]
    following: Sequence[int] | None
    placed: Arrangement | None
    place: Place
    short: bool
    followed: bool = False
    repeats: bool = False

    def has_any(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether one of these tensors is the batch's, even if it was changed."""
        own = {id(tensor) for reference, _ in self.loaded if (tensor := reference()) is not None}
        return any(id(tensor) in own for tensor in tensors)

    def places(self, inputs: Any) -> InputPlaces | None:
        """Return the positions of the inputs among the loaded tensors; None unless the tensors are unchanged.

        A batch that the loop has changed does not match the cache. Inference-mode tensors, which have no version
        counter, are treated as changed.
        """
        known = {
            id(leaf): place
            for place, (reference, version) in enumerate(self.loaded)
            if (leaf := reference()) is not None and version is not None and _version(leaf) == version
        }
        given = list(trees.leaves(inputs))
        tensors = [index for index, leaf in enumerate(given) if isinstance(leaf, Tensor)]
        found = {index: place for index in tensors if (place := known.get(id(given[index]))) is not None}
        others = [None if index in found else leaf for index, leaf in enumerate(given)]
        if not tensors or len(found) < len(tensors):
            return None
        return InputPlaces(trees.structure(inputs), found, others, trees.mapped(lambda _: None, inputs))


def tensors_of(loaded: Any) -> list[tuple[weakref.ref[Tensor], int | None]]:
    """Return the tensors of a batch, as `LoadedBatch` remembers them."""
    return [(weakref.ref(tensor), _version(tensor)) for tensor in trees.tensors(loaded)]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class RecentBatches:
    """The last batch of each recent iteration over a run's loaders, and the batch that is trained on."""

    def __init__(self) -> None:
        self.short: int | None = None  # rows of a short batch at the end of a loader's data
        self.trained: LoadedBatch | None = None  # the current training batch, if it may have to be loaded again
        self.loading: Place | None = None  # the batch that is being loaded
        self.rewound: LoadedBatch | None = None  # training batch at the time of a rollback
        self.trained_loader: RowSource | None = None  # the loader whose batch was trained on last
        self.input_places: InputPlaces | None = None  # positions of the inputs in a batch of the followed loader
        self.yielded: list[LoadedBatch] = []  # the last one first

    def saw(self, batch: LoadedBatch) -> None:
        """Record a batch that a loader has yielded to the loop."""
        others = [each for each in self.yielded if each.iteration is not batch.iteration]
        self.yielded = [batch, *others][:_YIELDED]

    def find(self, inputs: Any) -> tuple[LoadedBatch | None, InputPlaces | None]:
        """Return the batch whose tensors are among a call's inputs, and their positions unless they were changed."""
        tensors = trees.tensors(inputs)
        batch = next((each for each in self.yielded if each.has_any(tensors)), None)
        return batch, batch.places(inputs) if batch is not None else None

    def saw_step(self, batch: LoadedBatch | None, places: InputPlaces | None) -> LoadedBatch | None:
        """Record which iteration a step's batch came from: that of `find`, else the most recent iteration.

        Returns the followed loader's batch if the inputs are its tensors, unchanged and in the places of the first such
        step.
        """
        for each in [batch] if batch is not None else self.yielded[:1]:
            self.trained_loader = each.loader
            if each.iteration is not None:
                each.loader.saw_step(each.iteration)
        if batch is None or places is None or not batch.followed:
            return None
        self.input_places = self.input_places or places
        return batch if places == self.input_places else None


class StepRows:
    """This replica's rows of a batch, as passed to a method by the user's loop, and the functions to call with them.

    In a step, `number` counts it, and `cached` is the batch whose cached features may replace the first stages. With
    `may_repeat` the step keeps all that it needs to run again in another group. Losses are multiplied by `scale` before
    the backward.

    Example:
        rows = StepRows(trainer.data, trainer.exchange, trainer.now.placed, images, labels, [loss_fn])
        given = rows.now(trainer.now.placed, parts, graph)        # rows for the current placement
    """

    def __init__(
        self,
        data: RecentBatches,
        exchange: RowExchange,
        placed: Arrangement,
        inputs: Any,
        labels: Any,
        functions: Sequence[Any] = (),
    ) -> None:
        self._data, self._exchange, self._inputs, self._labels = data, exchange, inputs, labels
        self.functions = functions
        self.number, self.scale, self.may_repeat = 0, 1.0, False
        self.cached: LoadedBatch | None = None
        self.found = batch, self._input_places = data.find(inputs)
        self.batch = batch if batch is not None and batch.repeats and self._input_places is not None else None
        self._label_places = self.batch.places(labels) if self.batch is not None else None
        self._placed: Arrangement | None = self.batch.placed if self.batch is not None else placed
        self._given: tuple[Arrangement, StepInputs] | None = None
        self._bound: tuple[dict[str, Tensor], dict[str, int]] | None = None
        self._has_labels = any(isinstance(leaf, Tensor) for leaf in trees.leaves(labels))

    def check_repeatable(self) -> None:
        """Raise `UsageError` if the rows are not from a loader or were changed: they could not be loaded again."""
        if not self._repeatable:
            raise UsageError(
                "on_loss loads rows again if a process is lost, so train_step needs unchanged tensors of pipe.loader; "
                "change rows in the data set or in collate_fn, or leave on_loss out"
            )

    @property
    def _repeatable(self) -> bool:
        return self.batch is not None and (self._label_places is not None or not self._has_labels)

    def bound(self, graph: Graph) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the inputs by name, with their sizes; raises `UsageError` for inputs that the model rejects."""
        if self._bound is None:
            self._bound = bind(graph, self._inputs)
        return self._bound

    def is_short(self, num_rows: int) -> bool:
        """Return True if these are rows of a loader's last batch, which may be smaller than others."""
        return num_rows == self._data.short

    def now(self, placed: Arrangement, parts: Sequence[TrainingPart], graph: Graph) -> StepInputs:
        """Return the rows to compute with in a placement, from the rank that loads them (see `RowExchange.rows`)."""
        self.load(placed)
        if self._given is None or self._given[0] is not placed:
            own = StepInputs(*self.bound(graph), self._labels)
            self._given = placed, self._exchange.rows(placed, parts, graph, own, self.functions)
        return self._given[1]

    def load(self, placed: Arrangement) -> None:
        """Load the batch again if the placement has changed since its rows were split.

        After a rollback, load the batch after the checkpoint. Raises `DeviceLost` if the rows cannot be loaded again.
        """
        data, batch = self._data, self.batch
        if batch is not None and data.rewound is batch:
            data.rewound = None
            loaded, self.batch = batch.loader.take()
            data.trained = self.batch
            self._put(loaded, placed)
        elif placed is not self._placed:
            if batch is None or not self._repeatable:
                raise DeviceLost(
                    "a device was lost, and the rows of this call cannot be loaded again: they are not from "
                    "pipe.loader, or were changed; call again"
                )
            self._put(batch.loader.load_own(batch.samples, short=batch.short), placed)

    def _put(self, loaded: Any, placed: Arrangement) -> None:
        if self._input_places is not None:
            self._inputs, self._bound = self._input_places.inputs_of(loaded), None
        if self._label_places is not None:
            self._labels = self._label_places.inputs_of(loaded)
        self._placed = placed
