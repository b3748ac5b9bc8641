"""Batches for every process: the same order everywhere, each replica its own rows, loaded where they are used."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from penstock.errors import DataError, UsageError
from penstock.train.arrangement import Arrangement
from penstock.train.data_order import SampledOrder, SeededOrder, order_of
from penstock.train.features import Follower, LoadedBatch
from penstock.train.iterations import Iteration, Iterations
from penstock.train.loading import Collate, Shapes, WorkerStart, workers_of
from penstock.train.trainer import Trainer


class Loader:
    """An iterable over a data set, an epoch each time; each process gets its replica's rows of each batch.

    A process whose stages use neither inputs nor labels loads nothing: it gets tensors on the meta
    device, which have a shape and no values. The order depends on seed and epoch only. The last batch
    of an epoch may be small, and a replica's part of it empty.

    Example:
        for images, labels in pipe.loader(dataset, batch_size=64, shuffle=True): ...

    Raises `UsageError` for a data set without a length, `DataError` for an empty one.
    """

    def __init__(
        self, trainer: Trainer, data: Any, *, batch_size: int = 1, shuffle: bool = False, drop_last: bool = False,
        collate_fn: Collate | None = None, num_workers: int = 0, seed: int | None = None,
    ) -> None:  # fmt: skip
        self._trainer = trainer
        self._collate = collate_fn
        self._workers: dict[str, Any] = {"num_workers": num_workers}  # how a DataLoader loads
        seed = trainer.seed if seed is None else seed
        self._epoch = 0
        self.position = 0  # the next batch of the epoch
        self._known: tuple[int, list[list[int]]] | None = None  # the order of an epoch
        self._reached = 0  # the epoch before which iterations have ended
        self._iterations = Iterations()
        self.follower: Follower | None = None  # told of each epoch; steps are taken with this loader's batches
        given = data if isinstance(data, DataLoader) else None
        self._dataset: Dataset[Any] = given.dataset if given is not None else data
        if isinstance(self._dataset, IterableDataset) or not hasattr(self._dataset, "__len__"):
            raise UsageError("the data set has no length, so its rows cannot be shared out; use one with indices")
        if not self.num_samples:
            raise DataError("the data set is empty; give it at least one row")
        if given is not None:
            if (batch_size, shuffle, drop_last, collate_fn, num_workers) != (1, False, False, None, 0):
                raise UsageError("a DataLoader has its own batches, collate_fn and workers; give these to it alone")
            self._collate, self._workers = given.collate_fn, workers_of(given)
            self._order = order_of(given, trainer, seed)
            batch_size = (given.batch_size or 0) if isinstance(self._order, SeededOrder) else 0
        else:
            if batch_size < 1:
                raise UsageError(f"a batch has at least one row, not {batch_size}")
            self._order = SeededOrder(
                self.num_samples, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed
            )
        self._batch_size = batch_size  # of whole batches; 0 where a sampler of the user's says

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return len(self._order)

    def state(self) -> dict[str, int]:
        """Return the place in the data, to be continued from."""
        epoch, position = self._iterations.saved_place((self.epoch, self.position))
        return {"epoch": epoch, "position": position}

    @property
    def was_trained(self) -> bool:
        """Return whether the last step trained on a batch of this loader."""
        return self._trainer.trained_iterations is self._iterations

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or begins next; where a process joins a training, the others' one."""
        self._catch_up()
        return self._epoch

    def _catch_up(self) -> None:
        """In a process that has come while others train: go on where they do."""
        survivors = self._trainer.survivors
        place = survivors.place() if survivors is not None else None
        if place is not None:
            self._epoch, self.position = place
            self._reached = self._epoch
            self._iterations.restart()

    def resume(self, state: dict[str, int]) -> None:
        """Continue from a place in the data."""
        self._epoch, self.position = int(state["epoch"]), int(state["position"])
        self._reached = self._epoch
        self._iterations.restart()

    def rewind(self, place: tuple[int, int]) -> None:
        """Go back to a place in the data; an iteration that is under way ends where it would have ended."""
        self._epoch, self.position = place
        self._known = self._epoch, self._order.batches(self._epoch)

    def take(self) -> Any:
        """Load this process's rows of the next batch, outside of any iteration."""
        order = self._order_now()
        loaded = self.load_own(order[self.position], short=self._is_short(order))
        self._go_on(loaded, order)
        return loaded

    def _is_short(self, order: Sequence[Sequence[int]]) -> bool:
        """Return whether the next batch may be smaller than others."""
        return self.position + 1 == len(order) or len(order[self.position]) < self._batch_size

    def _go_on(self, loaded: Any, order: Sequence[Sequence[int]]) -> None:
        """Show the next batch, now that it has been loaded, to the training; go on to the one behind it."""
        trainer, position = self._trainer, self.position
        # what is cached is of the data that is followed
        if self.follower is not None or trainer.survivors is not None:
            following = order[position + 1] if position + 1 < len(order) else None
            trainer.saw_batch(LoadedBatch.of(
                loaded, order[position], following, self, trainer.placed, (self._epoch, position),
                short=self._is_short(order),
            ))  # fmt: skip
        last = position + 1 == len(order)
        self._epoch, self.position = (self._epoch + 1, 0) if last else (self._epoch, position + 1)

    def load_own(self, samples: Sequence[int], *, short: bool) -> Any:
        """Load this process's rows of a batch, as the training is arranged now."""
        (mine,) = self._parts([list(samples)])
        self._trainer.short_batch = len(mine) if short else None
        return next(self._load([mine], {"num_workers": 0}))

    def _order_now(self) -> list[list[int]]:
        """Return the order of this epoch, which is asked for once."""
        if self._known is None or self._known[0] != self._epoch:
            self._known = self._epoch, self._order.batches(self._epoch)
        return self._known[1]

    @property
    def batch_size(self) -> int:
        """How many rows a whole batch has, of all replicas together; on average where a sampler of the user's says."""
        return self._batch_size or -(-self.num_samples // max(1, len(self)))

    @property
    def num_samples(self) -> int:
        """How many rows the data set has."""
        return len(self._dataset)  # type: ignore[arg-type]

    def load(self, samples: Sequence[int]) -> Any:
        """Load these rows of the data set, in this process and as batches are."""
        collate = self._collate or torch.utils.data.default_collate
        return collate([self._dataset[sample] for sample in samples])

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of an epoch; where a checkpoint was loaded, the rest of it.

        The next iteration is the next epoch, also where this one is left early. If no step trained on its batches, as
        after a look at the first one, it is the same epoch again.

        Rows are shared out batch by batch: where the training's arrangement changes, from the next batch on as the new
        one has it.
        """
        trainer = self._trainer
        self._catch_up()
        self._epoch, self.position = self._iterations.next_place((self._epoch, self.position))
        iteration = self._iterations.begin((self._epoch, self.position))
        if self.follower is not None:
            self.follower.begin_epoch(self)
        self._known = None  # a sampler may draw anew
        ends = max(self._epoch, self._reached) + 1  # later where a checkpoint of an earlier epoch was gone back to
        placed: Arrangement | None = None
        shared: list[list[int]] | None = None
        expected: tuple[int, int] | None = None
        loads: Iterator[tuple[Any, int]] = iter(())
        while self._epoch < ends and (order := self._order_now()):
            place = self._epoch, self.position
            if trainer.placed is not placed or order is not shared or place != expected:
                placed, shared, mine = trainer.placed, order, self._parts(order[self.position :])
                loads = zip(self._load(mine, self._workers), map(len, mine), strict=True)
            with trainer.loading():
                loaded, num_rows = next(loads)
            trainer.short_batch = num_rows if self._is_short(order) else None
            self._go_on(loaded, order)
            expected = self._epoch, self.position
            self._reached = max(self._reached, ends if self._epoch == ends else 0)
            iteration.gave(loaded)
            iteration.place, iteration.order = expected, self._known
            trainer.gave_batch(self._iterations, iteration)
            yield loaded
            self._return_to(iteration)
            if self._epoch == ends and self.follower is not None:
                self.follower.end_epoch(self)
        self._iterations.end(iteration)

    def _return_to(self, iteration: Iteration) -> None:
        """Go on where an iteration was, if another one of this loader has begun since."""
        if self._iterations.go_on(iteration):
            self._epoch, self.position = iteration.place
            self._known = iteration.order

    def _parts(self, batches: list[list[int]]) -> list[list[int]]:
        """Return this process's rows of batches."""
        grid, index = self._trainer.grid, self._trainer.placed.replica_index
        parts = [grid.rows(len(batch))[index] for batch in batches]
        return [batch[part.start : part.stop] for batch, part in zip(batches, parts, strict=True)]

    def _load(self, batches: Sequence[list[int]], workers: Mapping[str, Any]) -> Iterator[Any]:
        """Load what this process uses; shapes alone of what it does not."""
        collate = self._collate or torch.utils.data.default_collate
        shapes: Shapes | None = None
        if not self._uses_data() or not all(batches):
            shapes = Shapes(collate, self._dataset)
        if shapes is not None and not self._uses_data():
            for rows in batches:
                yield shapes.of(len(rows))
            return
        begun: dict[str, Any] = {"worker_init_fn": WorkerStart(workers.get("worker_init_fn"))}
        if isinstance(self._order, SampledOrder):  # which has drawn from the user's generator
            begun["generator"] = torch.Generator().manual_seed(self._order.worker_seed)
        loader: Iterator[Any] = iter(DataLoader(
            self._dataset, batch_sampler=[rows for rows in batches if rows], collate_fn=collate, **{**workers, **begun},
        ))  # fmt: skip
        for rows in batches:
            if rows or shapes is None:
                yield next(loader)
            else:
                yield shapes.empty()

    def _uses_data(self) -> bool:
        """Return whether a stage here uses inputs or labels; where lengths vary, only the data says them."""
        now = self._trainer.now
        varying = len(now.captured.graph.symbols) > 1
        # also of stages whose outputs are cached: where a loop changes a batch, they are computed
        return varying or now.last_stage in now.tensors.stages or any(now.parts[s].own for s in now.tensors.stages)
