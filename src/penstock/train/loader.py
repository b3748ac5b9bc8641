"""Data loading: the same order on every rank, different rows per replica, each row loaded once."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from penstock.errors import DataError, UsageError
from penstock.train.agreement import check_same_data, data_identity
from penstock.train.arrangement import Arrangement
from penstock.train.batches import RowCut
from penstock.train.data_order import Iteration, Iterations, Place, SampledOrder, SeededOrder, order_of
from penstock.train.features import Follower, JoinPlace
from penstock.train.loaded_batch import LoadedBatch, tensors_of
from penstock.train.trainer import Trainer

Collate = Callable[[list[Any]], Any]

_PARENT_POLL_S = 0.5
EXAMPLE_ROWS = 5  # enough to not mistake a container with few entries for a list of rows
_SETTINGS = ["num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"]
_OF_WORKERS = ["prefetch_factor", "persistent_workers"]


def workers_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a DataLoader's settings as arguments for another DataLoader."""
    names = [*_SETTINGS, "in_order"] + (_OF_WORKERS if loader.num_workers else [])
    found = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if loader.pin_memory_device:
        found["pin_memory_device"] = loader.pin_memory_device
    return found


class WorkerStart:
    """A `worker_init_fn` that makes the worker exit with its parent, then calls the user's `worker_init_fn`."""

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Initialize a worker."""
        leave_with_parent()
        if self._then is not None:
            self._then(worker)


def leave_with_parent() -> None:
    """Exit this loader process soon after the training process exits, for any reason.

    A forked process holds all sockets of its parent. Until it exits, which may take as long as loading a row, the other
    ranks see no broken connection, and the run's port stays in use.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-parent", daemon=True).start()


def without_rows(example: Any) -> Any:
    """Return a batch without rows, from an example of `EXAMPLE_ROWS` rows."""
    return RowCut(exact=False).parts(example, EXAMPLE_ROWS, [[]])[0]


class Loader:
    """An iterable over a data set, one epoch per iteration; each process gets its replica's rows of each batch.

    The rank with a replica's first stage loads its rows; the other ranks receive labels, token ids and other small
    tensors from it, and stand-ins with the shapes of large tensors, and read no row themselves. The order depends only
    on seed and epoch, or is drawn by a sampler of the caller's. The last batch of an epoch may be small, and a
    replica's part of the batch empty.

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
        self._workers: dict[str, Any] = {"num_workers": num_workers}  # options of the DataLoader
        seed = trainer.seed if seed is None else seed
        self._epoch = 0
        self.position = 0  # number of the next batch in the epoch
        self.last_rows = 0  # rows of the batch that was loaded last, over all replicas
        self._known: tuple[int, list[list[int]]] | None = None  # an epoch, and its order
        self._reading: _Reading | None = None
        self._thread = threading.get_ident()
        self._joined: JoinPlace | None = None  # in a process that has just joined the run, until its first batch
        self._reached = 0  # all epochs before this one have ended
        self._iterations = Iterations()
        self.follower: Follower | None = None  # notified of each epoch; set only on the loader that is trained on
        given = data if isinstance(data, DataLoader) else None
        self._dataset: Dataset[Any] = given.dataset if given is not None else data
        if isinstance(self._dataset, IterableDataset) or not hasattr(self._dataset, "__len__"):
            raise UsageError("the data set must have a length to split its rows; use a map-style data set")
        if not self.num_samples:
            raise DataError("the data set must have at least one row; got none")
        if given is not None:
            if (batch_size, shuffle, drop_last, collate_fn, num_workers) != (1, False, False, None, 0):
                raise UsageError("a DataLoader has its own batches, collate_fn and workers; set them only there")
            self._collate, self._workers = given.collate_fn, workers_of(given)
            self._order = order_of(given, trainer, seed)
            batch_size = (given.batch_size or 0) if isinstance(self._order, SeededOrder) else 0
        else:
            if batch_size < 1:
                raise UsageError(f"batch_size must be at least 1; got {batch_size}")
            self._order = SeededOrder(
                self.num_samples, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed
            )
        self._batch_size = batch_size  # rows of a whole batch; 0 if a user's sampler sets the size

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._order)

    def state(self) -> dict[str, int]:
        """Return the position in the data to continue from."""
        epoch, position = self._iterations.saved_place((self.epoch, self.position))
        return {"epoch": epoch, "position": position}

    @property
    def was_trained(self) -> bool:
        """True if the last step trained on a batch of this loader."""
        return self._trainer.data.trained_loader is self

    def saw_step(self, iteration: Iteration) -> None:
        """Record that a step trained on a batch of an iteration."""
        self._iterations.saw_step(iteration)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, 0 at first; in a process that joins a run, the other ranks' epoch."""
        self._catch_up()
        return self._epoch

    def _catch_up(self) -> None:
        """In a process that joined a training run, continue at the position of the other ranks."""
        survivors = self._trainer.survivors
        place = survivors.place() if survivors is not None else None
        if place is not None:
            self._epoch, self.position, self._joined = place.epoch, place.batch, place
            self._reached = self._epoch
            self._iterations.restart()

    def resume(self, state: dict[str, int]) -> None:
        """Continue from a position in the data."""
        self._epoch, self.position = int(state["epoch"]), int(state["position"])
        self._reached = self._epoch
        self._iterations.restart()

    def rewind(self, place: Place) -> None:
        """Reset to an earlier position in the data; a running iteration still ends at the same epoch."""
        self._epoch, self.position = place
        self._known = self._epoch, self._order.batches(self._epoch)

    def take(self) -> tuple[Any, LoadedBatch]:
        """Load this process's rows of the next batch, outside of any iteration."""
        order = self._order_now()
        loaded = self.load_own(order[self.position], short=self._is_short(order))
        return loaded, self._go_on(loaded, order, None)

    def _is_short(self, order: Sequence[Sequence[int]]) -> bool:
        """Return whether the next batch may be smaller than the other batches."""
        return self.position + 1 == len(order) or len(order[self.position]) < self._batch_size

    def _go_on(
        self, loaded: Any, order: Sequence[Sequence[int]], iteration: Iteration | None, *, alone: bool = False
    ) -> LoadedBatch:
        """Describe the loaded batch, and advance to the next one; if loaded `alone`, a step loads it again."""
        trainer, position = self._trainer, self.position
        self.last_rows, last = len(order[position]), position + 1 == len(order)
        batch = LoadedBatch(
            loaded=tensors_of(loaded),
            loader=self,
            iteration=iteration,
            samples=order[position],
            following=None if last else order[position + 1],
            placed=None if alone else trainer.now.placed,
            place=(self._epoch, position),
            short=self._is_short(order),
            followed=self.follower is not None,
            repeats=trainer.survivors is not None,
        )
        self._epoch, self.position = (self._epoch + 1, 0) if last else (self._epoch, position + 1)
        return batch

    def load_own(self, samples: Sequence[int], *, short: bool) -> Any:
        """Load this process's rows of a batch for the current placement (a collective call of the replica)."""
        trainer, mine = self._trainer, self._own_rows(samples, short=short)
        return trainer.exchange.batch(
            trainer.now.placed, len(mine), lambda: next(self._load([mine], {"num_workers": 0})), self._example
        )

    def _order_now(self) -> list[list[int]]:
        """Return the order of this epoch, computed once."""
        if self._known is None or self._known[0] != self._epoch:
            self._known = self._epoch, self._order.batches(self._epoch)
        return self._known[1]

    @property
    def batch_size(self) -> int:
        """Rows of a whole batch, over all replicas; an average if a user's sampler sets the size."""
        return self._batch_size or -(-self.num_samples // max(1, len(self)))

    @property
    def num_samples(self) -> int:
        """Number of rows in the data set."""
        return len(self._dataset)  # type: ignore[arg-type]

    def load(self, samples: Sequence[int]) -> Any:
        """Load and collate these rows of the data set in this process."""
        collate = self._collate or torch.utils.data.default_collate
        return collate([self._dataset[sample] for sample in samples])

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch; after loading a checkpoint, the remaining batches of its epoch.

        The next iteration is the next epoch, even if this iteration is left early. If no step trained on its batches,
        for example if a loop only inspects the first batch, the same epoch is repeated.

        Rows are split batch by batch: a change of the placement takes effect at the next batch.
        """
        trainer = self._trainer
        self._catch_up()
        self._epoch, self.position = self._iterations.next_place((self._epoch, self.position))
        iteration = self._iterations.begin((self._epoch, self.position))
        if self._joined is None:
            self._compare()
        if self.follower is not None:
            self.follower.begin_epoch(self)
        self._known = None  # a sampler may draw another order
        # after a rollback to an earlier epoch, this iteration repeats all epochs up to `_reached`
        ends = max(self._epoch, self._reached) + 1
        while self._epoch < ends and (order := self._order_now()):
            alone, self._joined = self._joined is not None and not self._joined.loads, None
            with trainer.loading():
                loaded = self._load_alone(order) if alone else self._next()
            order = self._order_now()  # the run may have gone back to a checkpoint
            trainer.data.saw(self._go_on(loaded, order, iteration, alone=alone))
            self._reached = max(self._reached, ends if self._epoch == ends else 0)
            iteration.place, iteration.order = (self._epoch, self.position), self._known
            yield loaded
            self._return_to(iteration)
            if self._epoch == ends and self.follower is not None:
                self.follower.end_epoch(self)
        self._iterations.end(iteration)

    def _compare(self) -> None:
        """Check that all ranks have made the same data set (a collective call)."""
        trainer = self._trainer
        if trainer.world.transport.size == 1:
            return
        documents = trainer.together(lambda: {"rows": self.num_samples, "data": self._identity})
        loading: Sequence[int] = [replica.stages[0] for replica in trainer.now.placed.grid.replicas]
        if self.follower is not None:  # every rank computes cached outputs of its own rows
            loading = range(trainer.world.transport.size)
        check_same_data(documents, trainer.world.names, loading)

    @cached_property
    def _identity(self) -> dict[str, str]:
        return data_identity(self._dataset)

    def _load_alone(self, order: list[list[int]]) -> Any:
        """Load this replica's rows of the next batch, which the other ranks have loaded before this process joined."""
        mine = self._own_rows(order[self.position], short=self._is_short(order))
        return next(self._load([mine], {"num_workers": 0}))

    def _next(self) -> Any:
        """Return this replica's rows of the next batch (a collective call)."""
        trainer = self._trainer
        found: list[Any] = []

        def work() -> dict[str, Any]:
            found[:] = [self._read(self._order_now())]
            return {}

        if trainer.survivors is not None:
            trainer.data.loading = self._epoch, self.position
            trainer.together(work, admits=self.was_trained)
            trainer.data.loading = None
        elif threading.get_ident() == self._thread:
            with trainer.world.explained(), trainer.call("the loader"):
                work()
        else:  # a thread of the caller's that loads ahead: calls of the training go on beside it
            with trainer.world.explained():
                work()
        return found[0]

    def _read(self, order: list[list[int]]) -> Any:
        """Load or receive the next batch in the current placement."""
        trainer, place = self._trainer, (self._epoch, self.position)
        placed = trainer.now.placed
        mine = self._own_rows(order[self.position], short=self._is_short(order))
        now = self._reading
        if trainer.exchange.loads(placed) and (now is None or not now.continues(placed, order, place)):
            now = self._reading = _Reading(
                placed, order, self._load(self._parts(order[self.position :]), self._workers)
            )
        if now is not None:
            now.expected = (self._epoch, self.position + 1)
        return trainer.exchange.batch(placed, len(mine), lambda: next(now.batches) if now else None, self._example)

    def _return_to(self, iteration: Iteration) -> None:
        """Restore an iteration's position if another iteration of this loader has started meanwhile."""
        if self._iterations.go_on(iteration):
            self._epoch, self.position = iteration.place
            self._known = iteration.order

    def _own_rows(self, samples: Sequence[int], *, short: bool) -> list[int]:
        """Return this process's rows of a batch, and record whether it may be smaller than others."""
        (mine,) = self._parts([list(samples)])
        self._trainer.data.short = len(mine) if short else None
        return mine

    def _parts(self, batches: list[list[int]]) -> list[list[int]]:
        """Return this process's rows of batches."""
        grid, index = self._trainer.now.placed.grid, self._trainer.now.placed.replica_index
        parts = [grid.rows(len(batch))[index] for batch in batches]
        return [batch[part.start : part.stop] for batch, part in zip(batches, parts, strict=True)]

    def _load(self, batches: Sequence[list[int]], workers: Mapping[str, Any]) -> Iterator[Any]:
        """Load rows of the data set in this process."""
        begun: dict[str, Any] = {"worker_init_fn": WorkerStart(workers.get("worker_init_fn"))}
        if isinstance(self._order, SampledOrder):  # the seed was drawn from the user's generator
            begun["generator"] = torch.Generator().manual_seed(self._order.worker_seed)
        loader: Iterator[Any] = iter(
            DataLoader(
                self._dataset,
                batch_sampler=[rows for rows in batches if rows],
                collate_fn=self._collate,
                **{**workers, **begun},
            )
        )
        for left, rows in enumerate(batches, 1 - len(batches)):
            found = next(loader) if rows else without_rows(self._example())
            if not left:
                next(loader, None)  # its workers end; each that is left to the garbage collector takes it 5 s
            yield found

    def _example(self) -> Any:
        """Return a batch of the first row, repeated."""
        collate = self._collate or torch.utils.data.default_collate
        return collate([self._dataset[0]] * EXAMPLE_ROWS)


@dataclass(eq=False)
class _Reading:
    """Batches that this process loads in a placement, from one place of an epoch's order to its end."""

    placed: Arrangement
    order: list[list[int]]
    batches: Iterator[Any]
    expected: Place | None = None

    def continues(self, placed: Arrangement, order: list[list[int]], place: Place) -> bool:
        return self.placed is placed and self.order is order and self.expected == place
