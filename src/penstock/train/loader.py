"""Batches for every process: the same order everywhere, each replica its own rows, loaded where they are used."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from penstock.errors import DataError, UsageError
from penstock.train.arrangement import Arrangement
from penstock.train.features import Follower, LoadedBatch
from penstock.train.trainer import Trainer
from penstock.transport.base import FEEDER

_PARENT_POLL_S = 0.5
Collate = Callable[[list[Any]], Any]


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
        self._order: Callable[[], list[list[int]]] = self._own_order
        self._count: Callable[[], int] = lambda: len(self._own_order())
        self._batch_size, self._shuffle, self._drop_last = batch_size, shuffle, drop_last
        self._collate, self._num_workers = collate_fn, num_workers
        self._plain = True  # whether the order is this loader's own
        self._seed = trainer.seed if seed is None else seed
        self._epoch = 0
        self.position = 0  # the next batch of the epoch
        self._known: tuple[int, list[list[int]]] | None = None  # the order of an epoch
        self._reached = 0  # the epoch before which iterations have ended
        self.follower: Follower | None = None  # told of each epoch; steps are taken with this loader's batches
        self._dataset: Dataset[Any] = data
        if isinstance(data, DataLoader):
            self._take_over(data)
        if isinstance(self._dataset, IterableDataset) or not hasattr(self._dataset, "__len__"):
            raise UsageError("the data set has no length, so its rows cannot be shared out; use one with indices")
        if not len(self._dataset):
            raise DataError("the data set is empty; give it at least one row")
        if self._batch_size < 1:
            raise UsageError(f"a batch has at least one row, not {self._batch_size}")

    def _take_over(self, loader: DataLoader[Any]) -> None:
        """Load as a DataLoader would: its order is the first process's, where it is of the user's own making."""
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        self._num_workers = loader.num_workers
        plain = (
            type(loader.sampler) in {RandomSampler, SequentialSampler} and type(loader.batch_sampler) is BatchSampler
        )
        if plain and loader.batch_size is not None and not getattr(loader.sampler, "replacement", False):
            self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
            self._shuffle = type(loader.sampler) is RandomSampler
            return
        if loader.batch_sampler is None:
            raise UsageError("the DataLoader gives single rows; give it a batch_size")
        self._plain = False
        sampler = loader.batch_sampler
        self._count = lambda: len(sampler)  # type: ignore[arg-type]
        self._order = lambda: self._first_processes(sampler)

    def _first_processes(self, sampler: Iterable[list[int]]) -> list[list[int]]:
        if hasattr(sampler, "set_epoch"):  # as torch's DistributedSampler has it
            sampler.set_epoch(self._epoch)
        first = self._trainer.world.rank == FEEDER
        mine = [[int(index) for index in batch] for batch in sampler] if first else []
        order: list[list[int]] = self._trainer.together(lambda: {"order": mine})[FEEDER]["order"]
        return order

    def _own_order(self) -> list[list[int]]:
        count = len(self._dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        indices = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
        batches = [indices[start : start + self._batch_size] for start in range(0, count, self._batch_size)]
        return batches[:-1] if self._drop_last and len(batches[-1]) < self._batch_size else batches

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return self._count()

    def state(self) -> dict[str, int]:
        """Return the place in the data, to be continued from."""
        return {"epoch": self.epoch, "position": self.position}

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

    def resume(self, state: dict[str, int]) -> None:
        """Continue from a place in the data."""
        self._epoch, self.position = int(state["epoch"]), int(state["position"])
        self._reached = self._epoch

    def rewind(self, place: tuple[int, int]) -> None:
        """Go back to a place in the data; an iteration that is under way ends where it would have ended."""
        self._epoch, self.position = place
        self._known = self._epoch, self._order()

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
        return next(self._load([mine], num_workers=0))

    def _order_now(self) -> list[list[int]]:
        """Return the order of this epoch, which is asked for once."""
        if self._known is None or self._known[0] != self._epoch:
            self._known = self._epoch, self._order()
        return self._known[1]

    @property
    def batch_size(self) -> int:
        """How many rows a whole batch has, of all replicas together; on average where a sampler of the user's says."""
        return self._batch_size if self._plain else -(-self.num_samples // max(1, len(self)))

    @property
    def num_samples(self) -> int:
        """How many rows the data set has."""
        return len(self._dataset)  # type: ignore[arg-type]

    def load(self, samples: Sequence[int]) -> Any:
        """Load these rows of the data set, in this process and as batches are."""
        collate = self._collate or torch.utils.data.default_collate
        return collate([self._dataset[sample] for sample in samples])

    def __iter__(self) -> Iterator[Any]:
        """Return the rest of an epoch, from `position` on; the next iteration is the next epoch.

        Rows are shared out batch by batch: where the training's arrangement changes, from the next batch on as the new
        one has it.
        """
        trainer = self._trainer
        self._catch_up()
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
                loads = zip(self._load(mine, num_workers=self._num_workers), map(len, mine), strict=True)
            with trainer.loading():
                loaded, num_rows = next(loads)
            trainer.short_batch = num_rows if self._is_short(order) else None
            self._go_on(loaded, order)
            expected = self._epoch, self.position
            self._reached = max(self._reached, ends if self._epoch == ends else 0)
            yield loaded
            if self._epoch == ends and self.follower is not None:
                self.follower.end_epoch(self)

    def _parts(self, batches: list[list[int]]) -> list[list[int]]:
        """Return this process's rows of batches."""
        grid, index = self._trainer.grid, self._trainer.placed.replica_index
        parts = [grid.rows(len(batch))[index] for batch in batches]
        return [batch[part.start : part.stop] for batch, part in zip(batches, parts, strict=True)]

    def _load(self, batches: Sequence[list[int]], *, num_workers: int) -> Iterator[Any]:
        """Load what this process uses; shapes alone of what it does not."""
        collate = self._collate or torch.utils.data.default_collate
        example: Any = None
        if not self._uses_data() or not all(batches):
            example = collate([self._dataset[0]])
        if not self._uses_data():
            for rows in batches:
                yield pytree.tree_map(lambda x, rows=rows: _shape_only(x, len(rows)), example)
            return
        loader: Iterator[Any] = iter(DataLoader(
            self._dataset, batch_sampler=[rows for rows in batches if rows], collate_fn=collate,
            num_workers=num_workers, worker_init_fn=_leave_with_parent,
        ))  # fmt: skip
        for rows in batches:
            if rows:
                yield next(loader)
            else:
                yield pytree.tree_map(lambda x: x[:0] if isinstance(x, Tensor) and x.dim() else x, example)

    def _uses_data(self) -> bool:
        """Return whether a stage here uses inputs or labels; where lengths vary, only the data says them."""
        now = self._trainer.now
        varying = len(now.captured.graph.symbols) > 1
        # also of stages whose outputs are cached: where a loop changes a batch, they are computed
        return varying or now.last_stage in now.tensors.stages or any(now.parts[s].own for s in now.tensors.stages)


def _leave_with_parent(_worker: int) -> None:
    """In a process that loads data: end it soon after the one that trains, however that one went.

    A forked process holds all sockets of its parent. While it lives, which is as long as a row takes to load, the
    others see no connection break, and nobody can listen at the run's port again.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-parent", daemon=True).start()


def _shape_only(leaf: Any, num_rows: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    return torch.empty((num_rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
