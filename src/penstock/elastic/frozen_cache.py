"""A cache of the outputs of frozen layers for every sample: its filling, and the exchange of its rows, one batch ahead.

batch      3  8  5  2        4 processes; process s % 4 owns sample s
replica 0  3  8              process 0 holds its first running stage: it receives row 3 from process 3, and owns row 8
replica 1        5  2        its first running stage gets rows 5 and 2 in the same way

Rows whose owner is on the same machine are not sent: they are read from the owner's file.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import trees
from penstock.deploy.state import Held, Wanted, redistribute, room_for
from penstock.elastic.shard import Shard, ShardFile, ShardLayout, Values, bytes_per_row, make_columns, remove_abandoned
from penstock.engine.placement import Grid
from penstock.errors import CacheError, TransportError
from penstock.graph.call import as_call, bind_inputs
from penstock.graph.cuts import Cut, Cuts, TrainingPart, divide_for_training
from penstock.runtime.registry import EAGER
from penstock.tensors import digest, moved, sum_words
from penstock.train.agreement import agreed
from penstock.train.captured import Captured
from penstock.train.held_tensors import IN_FLIGHT
from penstock.train.loader import Loader
from penstock.train.trainer import Trainer
from penstock.transport.base import FEATURES, STATE, Pending, Transport
from penstock.transport.collectives import all_gather
from penstock.values import Size
from penstock.wire import FEEDER

_BATCH = 32  # rows computed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Folder and format of a cache on each machine: see `ElasticOptions`."""

    folder: Path
    limit_bytes: int | None
    stored: torch.dtype
    num_views: int = 1


def default_folder() -> Path:
    """Return the default folder of caches, within the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock" / "features"


def values_after(captured: Captured, cut: Cut) -> Values | None:
    """Return the values to store per sample at a cut; None if a value there has no row of fixed size per sample."""
    given = {value.name for value in captured.graph.tensor_inputs()}
    values = []
    for value in cut.crossing:
        if value.name in given:
            continue
        head, rest = (value.shape[0], value.shape[1:]) if value.shape else (None, ())
        if not isinstance(head, Size) or head.expression != "batch" or any(isinstance(d, Size) for d in rest):
            return None
        values.append((tuple(int(d) for d in rest if isinstance(d, int)), value.dtype))
    return values


def sizes_of_layers(captured: Captured, stored: torch.dtype, autocast: torch.dtype | None) -> list[int | None]:
    """Return for each layer the bytes on disk of a sample's outputs; None if they cannot be cached.

    No layer can be cached if a dimension other than the batch varies, or with autocast.
    """
    if set(captured.graph.symbols) != {"batch"} or autocast is not None:
        return [None] * len(captured.layers)
    values = [values_after(captured, cut) for cut in captured.layers]
    return [None if each is None else bytes_per_row(each, stored) for each in values]


def changes(loader: Loader, transport: Transport) -> bool:
    """Return True if a sample changes between two reads on any process, for example by random augmentation."""
    count = loader.num_samples
    found = any(
        _digests_in(loader.load([sample])) != _digests_in(loader.load([sample]))
        for sample in range(0, count, max(1, count // 8))
    )
    return any(document["changes"] for document in all_gather(transport, {"changes": found}))


def _digests_in(loaded: Any) -> list[str]:
    return [digest(leaf) for leaf in trees.leaves(loaded) if isinstance(leaf, Tensor)]


class Filling:
    """Fills a cache for a model with frozen layers; every process fills its own shard, in parallel.

    `before` is this process's shard of the cache of the first `layers` layers, from which the computation continues.
    Every process creates this object and calls `run`.

    Example:
        shards = Filling(trainer, captured, loader, place).run()
    """

    def __init__(
        self,
        trainer: Trainer,
        captured: Captured,
        loader: Loader,
        place: CachePlace,
        *,
        before: Shard | None = None,
        layers: int = 0,
    ) -> None:
        self._trainer, self._captured, self._loader, self._place = trainer, captured, loader, place
        self._before = before
        cuts = Cuts(captured.graph)
        self._end = cuts.at(captured.frozen_end)
        start = [cuts.find(captured.layers[layers - 1].name)] if before is not None else []
        parts = divide_for_training(captured.graph, [*start, self._end], captured.trainable)
        self._part: TrainingPart = parts[len(start)]
        rank, size = trainer.world.rank, trainer.world.transport.size
        self._num_all = loader.num_samples * place.num_views
        self._rows = range(rank, self._num_all, size)

    def run(self) -> dict[int, Shard]:
        """Fill the cache, and return the shards of this machine by rank.

        If a process fails, remove the cache and raise `CacheError` on every process.
        """
        weights, layouts, rank = dict(self._weights()), self._layouts(), self._trainer.world.rank
        named = all_gather(self._trainer.world.transport, {"folder": secrets.token_hex(8)})
        folder = self._place.folder / named[FEEDER]["folder"]
        remove_abandoned(self._place.folder)
        shards: dict[int, Shard] = {}
        names, together = self._trainer.world.names, self._trainer.together
        agree = partial(agreed, together, kind=CacheError, named=lambda rank, reason: f"{names[rank]}: {reason}")
        with contextlib.ExitStack() as named_files:
            agree(lambda: shards.update({rank: self._fill(folder, layouts[rank], weights, named_files)}))
            agree(lambda: shards.update(self._open_neighbours(folder, layouts)))
        return shards

    def _layouts(self) -> list[ShardLayout]:
        """Return the layouts of all processes' shards."""
        values = values_after(self._captured, self._end)
        if values is None:
            raise CacheError(
                f"a value that crosses {self._end.name} has no row of fixed size per sample, so it cannot be cached; "
                "train without the cache"
            )
        columns, size = make_columns(values, self._place.stored), self._trainer.world.transport.size
        return [
            ShardLayout(owner=rank, num_rows=len(range(rank, self._num_all, size)), columns=columns)
            for rank in range(size)
        ]

    def _open_neighbours(self, folder: Path, layouts: Sequence[ShardLayout]) -> dict[int, Shard]:
        """Open the shards of the other processes on this machine for reading."""
        world = self._trainer.world
        alike = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
        return {rank: Shard.open(folder, layouts[rank]) for rank in alike if rank != world.rank}

    def _fill(
        self, folder: Path, layout: ShardLayout, weights: Mapping[str, Tensor], named_files: contextlib.ExitStack
    ) -> Shard:
        """Compute this process's shard."""
        limit = self._place.limit_bytes
        if limit is not None:
            # this process's part of the machine's limit, minus the old shard, which still exists during filling
            limit = limit // self._neighbours() - (self._before.layout.num_bytes if self._before else 0)
        file = named_files.enter_context(ShardFile(folder, layout, limit))
        for outputs in self._computed(weights):
            file.append(outputs)
        return file.shard()

    def _samples(self, places: range) -> list[int]:
        return [self._rows[place] // self._place.num_views for place in places]

    def _neighbours(self) -> int:
        """Return the number of processes on this machine, including this one."""
        world = self._trainer.world
        return max(1, list(world.hosts).count(world.hosts[world.rank])) if world.hosts else 1

    @torch.no_grad()
    def _computed(self, weights: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
        """Compute the outputs of this process's samples, in batches of rows."""
        how = self._trainer.now.how
        runtime = EAGER.load_training(self._part, weights, how.device)
        own = {value.name for value in self._part.own}
        for places in _batches(len(self._rows)):
            crossing = self._before.read(places) if self._before is not None else []
            given = self._inputs(self._samples(places)) if own or self._before is None else {}
            sizes = {"batch": len(places)}
            inputs = [*crossing, *(given[value.name] for value in self._part.own)]
            yield [x.cpu() for x in runtime(sizes, [moved(x, how.device) for x in inputs])]

    def _inputs(self, samples: Sequence[int]) -> dict[str, Tensor]:
        places, graph = self._trainer.data.input_places, self._captured.graph
        if places is None:
            raise CacheError(
                "the cache needs train_step to be called with the loader's tensors; pass them unchanged, or train "
                "without the cache"
            )
        loaded = self._loader.load(samples)
        tensors, _ = bind_inputs(graph, *as_call(places.inputs_of(loaded)))
        return {value.name: tensor for value, tensor in zip(graph.tensor_inputs(), tensors, strict=True)}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Send every process the weights of the layers that it will compute; yields them with the program's names."""
        states = {state.source: state for state in self._part.program.states}
        tensors, world = self._trainer.now.tensors, self._trainer.world
        there = {name: tensors.holders(name) for name, state in states.items() if state.kind != "constant"}
        have = Held(there, tensors.find)
        want = Wanted(dict.fromkeys(there, range(world.transport.size)), lambda name: room_for(states[name]))
        for name, tensor in redistribute(have, want, world.transport, STATE, in_flight=IN_FLIGHT):
            yield states[name].value.name, moved(tensor, self._trainer.now.how.device)
        for state in states.values():
            if state.kind == "constant":
                constant = self._captured.graph.constants[state.source]
                yield state.value.name, moved(constant, self._trainer.now.how.device)


def _batches(end: int) -> Iterator[range]:
    return (range(begin, min(begin + _BATCH, end)) for begin in range(0, end, _BATCH))


_CHECKSUM_BYTES = 8


def owner_of(sample: int, size: int) -> int:
    """Return which of `size` ranks owns a sample."""
    return sample % size


def place_of(sample: int, size: int) -> int:
    """Return the index of a sample among its owner's samples."""
    return sample // size


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Rows of a batch that are in transit to this process."""

    batch: tuple[int, ...]
    rows: Future[list[Tensor]]


class CachedFeatures:
    """Outputs of frozen layers for this process's rows of each batch, read from files or sent by their owners.

    `shards` are the shards that this process can read: its own, and those on the same machine. The first `skipped`
    stages do not run; the holders of the next stage need the rows. With several views of each sample, `view` selects
    the view for this epoch.

    Example:
        features = CachedFeatures(transport, grid, skipped=1, shards={0: shard}, hosts=world.hosts, num_views=1)
        x, = features.outputs([3, 8, 5, 2], [7, 1])

    Raises `ConnectionBroken` if a process has failed, `TransportError` if rows were damaged in transit, `CacheError` if
    a shard has been closed.
    """

    def __init__(
        self,
        transport: Transport,
        grid: Grid,
        shards: Mapping[int, Shard],
        *,
        skipped: int,
        hosts: Sequence[str],
        num_views: int = 1,
        view: int = 0,
    ) -> None:
        self._transport, self._grid, self._shards, self._hosts = transport, grid, shards, hosts
        self._consumers = grid.holders(skipped)
        self._num_views, self.view = num_views, view
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-features")
        self._next: _Fetched | None = None

    def outputs(self, batch: Sequence[int], following: Sequence[int] | None) -> list[Tensor]:
        """Return the inputs of the first running stage for this process's rows of a batch.

        The `following` batch is fetched concurrently.
        """
        fetched, self._next = self._next, None
        found = fetched.rows.result() if fetched is not None else None
        if fetched is None or found is None or fetched.batch != tuple(batch):
            found = self._thread.submit(self._fetch, tuple(batch)).result()
        if following is not None:
            self._next = _Fetched(tuple(following), self._thread.submit(self._fetch, tuple(following)))
        return found

    def close(self) -> None:
        """Wait for the fetch in flight and discard it."""
        if self._next is not None:
            self._next.rows.exception()
            self._next = None
        self._thread.shutdown(wait=True)

    def _fetch(self, batch: tuple[int, ...]) -> list[Tensor]:
        """Send other processes the rows of a batch that they need, and gather the rows of this process."""
        own: list[Tensor] = []
        sends: list[tuple[Pending, Tensor]] = []
        for consumer, rows in zip(self._consumers, self._grid.rows(len(batch)), strict=True):
            samples = [sample * self._num_views + self.view for sample in batch[rows.start : rows.stop]]
            by_owner: dict[int, list[int]] = {}
            for position, sample in enumerate(samples):
                by_owner.setdefault(owner_of(sample, self._transport.size), []).append(position)
            if consumer == self._transport.rank:
                own = self._gather(samples, by_owner)
                continue
            mine = by_owner.get(self._transport.rank)
            if mine is not None and not self._alike(consumer, self._transport.rank):
                places = [place_of(samples[position], self._transport.size) for position in mine]
                packed = _pack(self._shards[self._transport.rank].read_stored(places))
                sends.append((self._transport.send(packed, consumer, FEATURES), packed))
        for pending, _ in sends:
            pending.wait()
        return own

    def _gather(self, samples: Sequence[int], by_owner: Mapping[int, Sequence[int]]) -> list[Tensor]:
        """Read rows on this machine, receive the rest, and put them in the batch's order."""
        shard = self._shards[self._transport.rank]
        columns = [torch.empty((len(samples), *shape), dtype=dtype) for shape, dtype in shard.values]
        coming: list[tuple[int, Sequence[int], Tensor, Pending]] = []
        for owner, positions in sorted(by_owner.items()):
            if not self._alike(owner, self._transport.rank):
                room = torch.empty(_CHECKSUM_BYTES + len(positions) * shard.row_bytes, dtype=torch.uint8)
                coming.append((owner, positions, room, self._transport.receive(room, owner, FEATURES)))
        for owner, positions in by_owner.items():
            if self._alike(owner, self._transport.rank):
                places = [place_of(samples[position], self._transport.size) for position in positions]
                _fill(columns, positions, self._shards[owner].read(places))
        for owner, positions, room, pending in coming:
            pending.wait()
            _fill(columns, positions, _unpack(room, shard, len(positions), owner))
        return columns

    def _alike(self, rank: int, other: int) -> bool:
        """Return True if two ranks are on one machine, so that one can read the other's files."""
        return rank == other or (bool(self._hosts) and self._hosts[rank] == self._hosts[other])


def _fill(columns: Sequence[Tensor], positions: Sequence[int], rows: Sequence[Tensor]) -> None:
    there = torch.as_tensor(positions)
    for column, part in zip(columns, rows, strict=True):
        column[there] = part.to(column.dtype)


def _pack(columns: Sequence[Tensor]) -> Tensor:
    """Serialize rows: a checksum, then the bytes of one value after the other."""
    flat = torch.cat([column.contiguous().reshape(-1).view(torch.uint8) for column in columns])
    checksum = bytearray((sum_words(flat) % 2**64).to_bytes(_CHECKSUM_BYTES, "little"))
    return torch.cat([torch.frombuffer(checksum, dtype=torch.uint8), flat])


def _unpack(packed: Tensor, shard: Shard, num_rows: int, owner: int) -> list[Tensor]:
    """Unpack the rows of `_pack`; raises `TransportError` if they are damaged."""
    flat = packed[_CHECKSUM_BYTES:]
    checksum = int.from_bytes(packed[:_CHECKSUM_BYTES].numpy().tobytes(), "little")
    if sum_words(flat) % 2**64 != checksum:
        raise TransportError(f"cached rows from rank {owner} are damaged; check the network and continue with --resume")
    columns, begin = [], 0
    for shape, dtype in shard.stored_values:
        end = begin + num_rows * dtype.itemsize * torch.Size(shape).numel()
        columns.append(flat[begin:end].clone().view(dtype).view(num_rows, *shape))  # aligned for any dtype
        begin = end
    return columns
