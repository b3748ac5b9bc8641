"""The rows of a step or of another call, which are reloaded if the placement changes during the call."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock import trees
from penstock.errors import DeviceLost, UsageError
from penstock.graph.graph import Graph
from penstock.graph.stages import TrainingPart
from penstock.train.arrangement import Arrangement
from penstock.train.batches import bind
from penstock.train.loaded_batch import LoadedBatch, RecentBatches
from penstock.train.row_exchange import RowExchange, StepInputs


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
        self, data: RecentBatches, exchange: RowExchange, placed: Arrangement, inputs: Any, labels: Any,
        functions: Sequence[Any] = (),
    ) -> None:  # fmt: skip
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
