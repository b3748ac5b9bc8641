"""Batches that loaders have given to the user's loop, by which a step finds out where its rows came from."""

from typing import Any

from penstock import trees
from penstock.train.features import InputPlaces, LoadedBatch
from penstock.train.iterations import Iteration, Iterations

_GIVEN = 8  # iterations of loaders whose batches are known
_BATCHES = 4  # of other loaders too: a validation may run between a batch and its step


class RecentBatches:
    """The last batches of a training's loaders, and the one that is trained on.

    Loaders report what they give, `find` returns the batch that a step's inputs are of.
    """

    def __init__(self) -> None:
        self.short: int | None = None  # rows of a loader's last batch, which may be few
        self.loaded: LoadedBatch | None = None  # last batch of the followed loader
        self.trained: LoadedBatch | None = None  # the current training batch
        self.rewound: LoadedBatch | None = None  # training batch at the time of a rollback
        self.trained_iterations: Iterations | None = None  # of the loader whose batch was trained on last
        self.input_places: InputPlaces | None = None  # positions of the inputs in a loaded batch
        self._repeatable: list[LoadedBatch] = []  # last one of each recent loader, if calls may be repeated
        self._given: list[tuple[Iterations, Iteration]] = []  # those of the last batches

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
        """Record the iteration of a step's batch: that of its tensors, or else of the last batch."""
        tensors = trees.tensors(inputs)
        found = next((each for each in self._given if each[1].has_given(tensors)), None)
        for iterations, iteration in [found] if found is not None else self._given[:1]:
            iterations.saw_step(iteration)
            self.trained_iterations = iterations

    def find(self, inputs: Any) -> tuple[LoadedBatch, InputPlaces] | None:
        """Return the batch that a call's inputs are of, if the call may be repeated, and their positions in it."""
        for batch in self._repeatable:
            if (places := batch.places(inputs)) is not None:
                return batch, places
        return None

    def as_loaded(self, inputs: Any) -> LoadedBatch | None:
        """Return the followed loader's batch if a step's inputs are its own, unchanged and at their usual places."""
        places = self.loaded.places(inputs) if self.loaded is not None else None
        self.input_places = self.input_places or places
        return self.loaded if places is not None and places == self.input_places else None
