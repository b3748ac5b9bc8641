"""The rows of one call, reloaded if the training is rearranged during the call."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock import trees
from penstock.errors import DeviceLost, UsageError
from penstock.train.batches import bind
from penstock.train.features import InputPlaces, LoadedBatch

if TYPE_CHECKING:
    from penstock.train.trainer import Trainer


class StepRows:
    """This replica's rows of a batch, as passed to a method by the user's loop.

    Example:
        rows = StepRows(trainer, images, labels)
        inputs, labels = rows.now()        # those of the current placement
    """

    def __init__(self, trainer: "Trainer", inputs: Any, labels: Any) -> None:
        self._trainer = trainer
        self._inputs, self._labels = inputs, labels
        self.batch: LoadedBatch | None = None
        self._input_places: InputPlaces | None = None
        for batch in trainer.batches:
            if (places := batch.places(inputs)) is not None:
                self.batch, self._input_places = batch, places
                break
        self._label_places = self.batch.places(labels) if self.batch is not None else None
        self._placed = self.batch.placed if self.batch is not None else trainer.placed
        self._bound: tuple[dict[str, Tensor], dict[str, int]] | None = None
        self._has_labels = any(isinstance(leaf, Tensor) for leaf in trees.leaves(labels))

    def check_repeatable(self) -> None:
        """Raise `UsageError` for rows that are not from a loader, which cannot be loaded again."""
        if not self._repeatable:
            raise UsageError(
                "on_loss loads rows again after a loss, so train_step needs the tensors of pipe.loader, unchanged; "
                "change rows in the data set or its collate_fn, or leave on_loss out"
            )

    @property
    def _repeatable(self) -> bool:
        return self._input_places is not None and (self._label_places is not None or not self._has_labels)

    def bound(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the inputs by name, with their sizes; raises `UsageError` for inputs that the model rejects."""
        if self._bound is None:
            self._bound = bind(self._trainer.captured.graph, self._inputs)
        return self._bound

    def now(self) -> tuple[Any, Any]:
        """Return inputs and labels of the batch to train on, for the current placement.

        After a rollback that is the batch after the checkpoint. Raises `DeviceLost` for rows that cannot be
        loaded again.
        """
        trainer, batch = self._trainer, self.batch
        if batch is not None and trainer.rewound is batch:
            trainer.rewound = None
            self._put(batch.loader.take())
            self.batch = trainer.trained = trainer.loaded
        elif trainer.placed is not self._placed:
            if batch is None or not self._repeatable:
                raise DeviceLost(
                    "a device was lost, and the rows of this call cannot be redistributed: they are not from "
                    "pipe.loader; call again"
                )
            self._put(batch.loader.load_own(batch.samples, short=batch.short))
        return self._inputs, self._labels

    def _put(self, loaded: Any) -> None:
        if self._input_places is not None:
            self._inputs, self._bound = self._input_places.inputs_of(loaded), None
        if self._label_places is not None:
            self._labels = self._label_places.inputs_of(loaded)
        self._placed = self._trainer.placed
