"""The order of a data set's rows, the same on every process, and where the next iteration over a loader starts."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from penstock.errors import UsageError
from penstock.text import note
from penstock.wire import FEEDER

_PART = 500_000  # rows of an order that are sent in one document
Batches = list[list[int]]


class Order(Protocol):
    """The order of an epoch's batches."""

    def batches(self, epoch: int) -> Batches:
        """Return the rows of each batch (a collective call)."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""


class SeededOrder:
    """An order with every row once, sequential or shuffled by seed and epoch.

    Example:
        SeededOrder(11, batch_size=4, shuffle=True, drop_last=False, seed=0).batches(epoch=2)
    """

    def __init__(
        self, num_rows: int, *, batch_size: int, shuffle: bool, drop_last: bool, seed: int, multiple: int = 1
    ) -> None:
        self._num_rows, self._multiple = num_rows, multiple
        self._batch_size, self._shuffle, self._drop_last, self._seed = batch_size, shuffle, drop_last, seed

    def batches(self, epoch: int) -> Batches:
        """Return the rows of each batch."""
        count = self._num_rows
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        rows = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
        rows = rows[: count - count % self._multiple]
        found = [rows[start : start + self._batch_size] for start in range(0, len(rows), self._batch_size)]
        return found[:-1] if self._drop_last and found and len(found[-1]) < self._batch_size else found

    def __len__(self) -> int:
        """Return the number of batches."""
        count = self._num_rows - self._num_rows % self._multiple
        return count // self._batch_size if self._drop_last else -(-count // self._batch_size)


class SampledOrder:
    """The order of a DataLoader's batch sampler, drawn on rank 0 once for each iteration."""

    def __init__(self, loader: DataLoader[Any], trainer: Any) -> None:
        self._loader, self._trainer = loader, trainer
        self.worker_seed = 0  # seed of the loader processes of an epoch

    def batches(self, epoch: int) -> Batches:
        """Return the rows of each batch, broadcast from rank 0."""
        mine: list[Batches] = []
        # like a DataLoader, first draw a seed for the workers from the same generator
        self.worker_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator))
        if self._trainer.world.rank == FEEDER:
            mine = list(_in_parts(self._draw(epoch)))
        found: Batches = []
        place, count = 0, 1
        while place < count:
            told = self._trainer.together(lambda place=place: self._part(mine, place))[FEEDER]
            found += told["order"]
            place, count = place + 1, told["parts"]
        return found

    @staticmethod
    def _part(parts: Sequence[Batches], place: int) -> dict[str, Any]:
        return {"order": parts[place] if place < len(parts) else [], "parts": len(parts)}

    def _draw(self, epoch: int) -> Batches:
        sampler = self._loader.batch_sampler
        for each in (sampler, getattr(sampler, "sampler", None)):
            if (set_epoch := getattr(each, "set_epoch", None)) is not None:  # as in torch's DistributedSampler
                set_epoch(epoch)
        batches: Iterable[Any] = sampler if sampler is not None else ()
        try:
            return [[int(row) for row in batch] for batch in batches]
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"a sampler must yield row numbers, but {_name(sampler)} yields something else ({error}); "
                "look the row up in the data set"
            ) from error

    def __len__(self) -> int:
        """Return the number of batches, as the DataLoader does."""
        return len(self._loader)


def order_of(loader: DataLoader[Any], trainer: Any, seed: int) -> Order:
    """Return the order of a DataLoader; raises `UsageError` if it yields single rows instead of batches.

    A whole data set, sequential or shuffled without a generator, is ordered by seed and epoch alone. A
    `DistributedSampler` is replaced by its data set. From any other sampler, rank 0 draws.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is None:
        raise UsageError("the DataLoader must yield batches, not single rows; set its batch_size")
    plain = type(batches) is BatchSampler
    inner: Any = batches.sampler if isinstance(batches, BatchSampler) else getattr(batches, "sampler", sampler)
    if isinstance(inner, DistributedSampler):
        return _undistributed(batches, inner, plain=plain, trainer=trainer)
    if plain and isinstance(batches, BatchSampler) and _is_whole(inner, loader):
        return SeededOrder(
            len(inner.data_source),
            batch_size=batches.batch_size,
            drop_last=batches.drop_last,
            shuffle=type(inner) is RandomSampler,
            seed=seed,
        )
    return SampledOrder(loader, trainer)


def _is_whole(sampler: Any, loader: DataLoader[Any]) -> bool:
    """Return whether a sampler yields every row of the DataLoader's data set once."""
    if getattr(sampler, "data_source", None) is not loader.dataset:
        return False
    if type(sampler) is SequentialSampler:
        return True
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler._num_samples is None
        and sampler.generator is None
        and loader.generator is None
    )


def _undistributed(batches: Any, sampler: DistributedSampler[Any], *, plain: bool, trainer: Any) -> Order:
    """Replace a sampler of one process's rows by an order of all rows."""
    if not plain or type(sampler).__iter__ is not DistributedSampler.__iter__:
        raise UsageError(
            f"{_name(sampler if plain else batches)} yields different rows on each process, but pipe.loader splits "
            "rows itself; use a sampler of the whole data set"
        )
    if trainer.world.rank == FEEDER:
        note(
            f"the DistributedSampler is replaced by its data set: rows are split over the replicas, and a batch "
            f"has {batches.batch_size} rows over all of them"
        )
    dataset: Sized = sampler.dataset  # type: ignore[assignment]
    return SeededOrder(
        len(dataset),
        batch_size=batches.batch_size,
        drop_last=batches.drop_last,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        multiple=sampler.num_replicas if sampler.drop_last else 1,
    )


def _in_parts(batches: Batches) -> Iterator[Batches]:
    """Split an order into parts that each fit into one document; yields at least one part."""
    part: Batches = []
    rows = 0
    for batch in batches:
        if rows and rows + len(batch) > _PART:
            yield part
            part, rows = [], 0
        part.append(batch)
        rows += len(batch)
    yield part


def _name(sampler: object) -> str:
    return type(sampler).__name__


Place = tuple[int, int]  # epoch, and number of the batch in the epoch


@dataclass(eq=False)
class Iteration:
    """One iteration over a loader: its position, and whether a step trained on its batches."""

    number: int
    begin: Place
    place: Place
    order: Any = None  # order of its epoch
    trained: bool = False
    finished: bool = False


class Iterations:
    """All iterations over one loader.

    The next iteration starts at the next epoch if a step trained on a batch of the last iteration, otherwise at the
    same position, as after a loop that only inspected a batch.
    """

    def __init__(self) -> None:
        self._last: Iteration | None = None
        self._trained: Iteration | None = None  # the last that a step trained on; None once a later one has ended
        self._number = 0

    def restart(self) -> None:
        """Drop unfinished iterations: the position in the data has changed."""
        self._last = self._trained = None

    def next_place(self, place: Place) -> Place:
        """Return the start of the next iteration; `place` is the current position."""
        last, trained = self._last, self._trained
        if last is not None and not last.finished:
            last.place, place = place, place if last.trained else last.begin
        if trained is not None and not trained.finished and trained.place[0] >= place[0]:
            epoch, batch = trained.place
            return (epoch, 0) if batch == 0 and epoch > trained.begin[0] else (epoch + 1, 0)
        return place

    def begin(self, place: Place) -> Iteration:
        """Start another iteration."""
        self._number += 1
        self._last = Iteration(self._number, place, place)
        return self._last

    def go_on(self, iteration: Iteration) -> bool:
        """Continue an iteration; return whether another has started meanwhile, so that the position must be restored.

        Raises `UsageError` if a step trained on a batch of a later iteration.
        """
        if self._last is iteration:
            return False
        if self._trained is not None and self._trained.number > iteration.number:
            raise UsageError(
                "a loop over this loader continues although a later loop has trained on the loader's batches; give "
                "each loop its own pipe.loader"
            )
        self._last = iteration
        return True

    def saw_step(self, iteration: Iteration) -> None:
        """Record that a step trained on a batch of an iteration."""
        iteration.trained = True
        if self._trained is None or self._trained.number <= iteration.number:
            self._trained = iteration

    def end(self, iteration: Iteration) -> None:
        """Record that an iteration has yielded its last batch."""
        iteration.finished = True
        if self._last is iteration:
            self._trained = None

    def saved_place(self, place: Place) -> Place:
        """Return the position for a checkpoint to continue from; batches that were only inspected do not count."""
        last, trained = self._last, self._trained
        if last is None or last.finished or last.trained:
            return place
        return trained.place if trained is not None and not trained.finished else last.begin
