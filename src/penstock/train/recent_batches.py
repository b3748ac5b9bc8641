"""Batches that loaders have recently yielded, from which a step determines where its rows come from."""

from typing import Any

from penstock import trees
from penstock.train.features import InputPlaces, LoadedBatch
from penstock.train.iterations import Iteration, Iterations

_GIVEN = 8  # iterations whose last batch is remembered
_BATCHES = 4  # batches remembered, one per loader, since a validation loader may run before the step


class RecentBatches:
    """The last batches of a run's loaders, and the batch that is trained on.

    Loaders report the batches that they yield; `find` returns the batch that a step's inputs come from.
    """

    def __init__(self) -> None:
        self.short: int | None = None  # rows of a short batch at the end of a loader's data
        self.loaded: LoadedBatch | None = None  # last batch of the followed loader
        self.trained: LoadedBatch | None = None  # the current training batch
        self.loading: tuple[int, int] | None = None  # epoch and number of the batch that is being loaded
        self.rewound: LoadedBatch | None = None  # training batch at the time of a rollback
        self.trained_iterations: Iterations | None = None  # iterations of the loader whose batch was trained on last
        self.input_places: InputPlaces | None = None  # positions of the inputs in a loaded batch
        self._repeatable: list[LoadedBatch] = []  # last batch of each recent loader, if calls may be repeated
        self._given: list[tuple[Iterations, Iteration]] = []  # iterations that yielded the last batches

    def gave(self, iterations: Iterations, iteration: Iteration) -> None:
        """Record an iteration that has yielded a batch."""
        self._given = [(iterations, iteration), *(each for each in self._given if each[1] is not iteration)][:_GIVEN]

    def saw(self, batch: LoadedBatch, *, may_repeat: bool) -> None:
        """Record a batch that a loader has yielded to the loop."""
        self.loaded = batch
        if may_repeat:
            others = [each for each in self._repeatable if each.loader is not batch.loader]
            self._repeatable = [batch, *others][:_BATCHES]

    def saw_step(self, inputs: Any) -> None:
        """Record which iteration a step's batch came from: found by its tensors, else the most recent iteration."""
        tensors = trees.tensors(inputs)
        found = next((each for each in self._given if each[1].has_given(tensors)), None)
        for iterations, iteration in [found] if found is not None else self._given[:1]:
            iterations.saw_step(iteration)
            self.trained_iterations = iterations

    def find(self, inputs: Any) -> tuple[LoadedBatch, InputPlaces] | None:
        """Return the batch that a call's inputs come from, and their positions in it; None if it cannot be repeated."""
        for batch in self._repeatable:
            if (places := batch.places(inputs)) is not None:
                return batch, places
        return None

    def as_loaded(self, inputs: Any) -> LoadedBatch | None:
        """Return the followed loader's batch if a step's inputs are its tensors, unchanged and in the usual places."""
        places = self.loaded.places(inputs) if self.loaded is not None else None
        self.input_places = self.input_places or places
        return self.loaded if places is not None and places == self.input_places else None
