"""Exchange of cached rows between the processes that own them and the processes that need them, one batch ahead.

batch      3  8  5  2        4 processes; process s % 4 owns sample s
replica 0  3  8              process 0 holds its first running stage: it receives row 3 from process 3, and owns row 8
replica 1        5  2        its first running stage gets rows 5 and 2 in the same way

Rows whose owner is on the same machine are not sent: they are read from the owner's file.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.elastic.cache.shard import Shard
from penstock.engine.placement import Grid
from penstock.errors import TransportError
from penstock.tensors import sum_words
from penstock.transport.base import FEATURES, Pending, Transport

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
        self, transport: Transport, grid: Grid, shards: Mapping[int, Shard], *, skipped: int, hosts: Sequence[str],
        num_views: int = 1, view: int = 0,
    ) -> None:  # fmt: skip
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
