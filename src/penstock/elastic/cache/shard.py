"""On-disk rows of the samples that one process owns.

    folder/
        shard-0/                    the shard of owner 0, which only this process writes
            manifest.json           its owner, and the number of valid rows
            0.rows  1.rows          their values
        shard-1/                    another process's, which can be read

The manifest is replaced atomically, after the rows that it counts are on the disk. So after a process fails at any
moment its shard continues from the last flush, and later rows are written again.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from penstock.elastic.cache.disk import check_files, explained, lock, map_file, unlock, write_rows
from penstock.elastic.cache.folder import other_cache, place_of, prepare, remove_shard
from penstock.elastic.cache.layout import Values, bfloat16_helps, make_layout
from penstock.elastic.cache.manifest import MANIFEST, Manifest, make_manifest, read_manifest, rows_path, write_manifest
from penstock.errors import CacheError
from penstock.files import flush
from penstock.tensors import HOST
from penstock.units import format_bytes


class Shard:
    """The values of some samples, one row for each, in files that are mapped into memory.

    Example:
        with Shard.create_or_resume(Path("cache/depth-2"), key=key, owner=0, num_rows=len(samples),
                                    values=[((197, 384), torch.float32)], stored=torch.bfloat16,
                                    limit_bytes=None) as shard:
            while not shard.complete:
                shard.append(frozen(batch_from(shard.num_done)))
                shard.flush()
            (values,) = shard.read([7, 3])

    Every error of a cache is a `CacheError` in one line, so that a caller can continue without one.
    """

    def __init__(self, place: Path, manifest: Manifest, descriptor: int | None) -> None:
        self._place, self._manifest, self._layout = place, manifest, manifest.layout()
        self._lock = descriptor
        self._writable = descriptor is not None
        self._open = True
        self._num_done = manifest.done
        self._mapped: dict[int, list[Tensor]] = {}

    @classmethod
    def create_or_resume(
        cls,
        folder: Path,
        *,
        key: str,
        owner: int,
        num_rows: int,
        values: Values,
        stored: torch.dtype | None,
        limit_bytes: int | None,
        replace: bool = False,
    ) -> "Shard":
        """Open the shard of an owner for filling, continuing from its last flush; its space is reserved.

        `values` are the shape, without the batch, and the dtype of each tensor that a row has. Floats are stored as
        `stored` (float32 or bfloat16) if that is smaller, everything else exactly. `key` is from `cache_key`.

        Raises `CacheError` if the folder cannot be written or has no space, for more than `limit_bytes`, if another
        process has the shard open, and for one that is damaged or holds other rows; `replace` removes those.
        """
        layout = make_layout(values, stored, num_rows)
        if limit_bytes is not None and layout.num_bytes > limit_bytes:
            raise CacheError(
                f"the cache needs {format_bytes(layout.num_bytes)}, more than its limit of "
                f"{format_bytes(limit_bytes)}; give a larger limit{bfloat16_helps(layout)}"
            )
        place, wanted = place_of(folder, owner), make_manifest(key, owner, layout)
        with explained(place):
            descriptor = lock(place)
            try:
                return cls(place, prepare(place, wanted, replace), descriptor)
            except BaseException:
                unlock(descriptor)
                raise

    @classmethod
    def open_existing(cls, folder: Path, key: str, owner: int) -> "Shard":
        """Open a complete shard for reading, also one of another process of this machine.

        It stays readable when its owner deletes it. Raises `CacheError` if it is missing, incomplete, damaged or of
        another key.
        """
        place = place_of(folder, owner)
        found = read_manifest(place)
        if found is None:
            raise CacheError(f"{place} holds no cache: {MANIFEST} not found; check the folder, or fill it first")
        if (found.key, found.owner) != (key, owner):
            raise other_cache(place, found, f"not of owner {owner} with the key {key[:40]}; check the folder")
        if found.done < found.num_rows:
            raise CacheError(f"{place} has {found.done} of {found.num_rows} rows; wait until its owner has filled it")
        check_files(place, found.layout(), found.done)
        shard = cls(place, found, None)
        for file in range(shard._layout.num_files):
            shard._map(file)
        return shard

    @property
    def num_rows(self) -> int:
        """Number of rows when complete."""
        return self._layout.num_rows

    @property
    def num_done(self) -> int:
        """Number of rows that can be read; those since the last flush are lost with the process."""
        return self._num_done

    @property
    def complete(self) -> bool:
        """True if all rows can be read."""
        return self._num_done == self.num_rows

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its files, which are reserved from the beginning."""
        return self._layout.num_bytes

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Write the next rows, one tensor for each value with rows as its first dimension, from any device.

        Raises `CacheError` for tensors that do not match `values`, for more rows than are missing, and if the disk
        fails; no row then counts as written.
        """
        self._check_open(to_write=True)
        count = self._check_rows(tensors)
        columns = [
            tensor.detach().to(device=HOST, dtype=column.stored).contiguous()
            for column, tensor in zip(self._layout.columns, tensors, strict=True)
        ]
        taken = 0
        with explained(self._place):
            for file, row, here in self._layout.spans(self._num_done, count):
                part = [column[taken : taken + here] for column in columns]
                write_rows(rows_path(self._place, file), self._layout, file, row, part)
                taken += here
        self._num_done += count

    def _check_rows(self, tensors: Sequence[Tensor]) -> int:
        """Return the number of rows of a batch; raises `CacheError` if they cannot be the next ones."""
        expected = [(column.shape, column.dtype) for column in self._layout.columns]
        found = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
        counts = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors}
        if found != expected or len(counts) != 1 or -1 in counts:
            shown = [(list(tensor.shape), tensor.dtype) for tensor in tensors]
            raise CacheError(
                f"rows of this cache must be tensors of {expected}; got {shown}; give one of each, rows first"
            )
        (count,) = counts
        if count > self.num_rows - self._num_done:
            missing = self.num_rows - self._num_done
            raise CacheError(f"{self._place} has {missing} rows left to fill; got {count}; give only its own samples")
        return count

    def flush(self) -> None:
        """Flush the rows written so far to the disk and count them as done; raises `CacheError` if this fails."""
        self._check_open(to_write=True)
        if self._num_done == self._manifest.done:
            return
        manifest = msgspec.structs.replace(self._manifest, done=self._num_done)
        with explained(self._place):
            for file, _, _ in self._layout.spans(self._manifest.done, self._num_done - self._manifest.done):
                flush(rows_path(self._place, file))
            write_manifest(self._place, manifest)
        self._manifest = manifest

    @property
    def values(self) -> Values:
        """Shape and dtype of each value of a row, as `read` returns it."""
        return [(column.shape, column.dtype) for column in self._layout.columns]

    @property
    def stored_values(self) -> Values:
        """Return the shape and dtype of each value of a row, as it is stored."""
        return [(column.shape, column.stored) for column in self._layout.columns]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row as it is stored."""
        return sum(column.row_bytes for column in self._layout.columns)

    def read(self, rows: Tensor | Sequence[int]) -> list[Tensor]:
        """Return copies of rows, given by their indices in the shard in any order, one tensor for each value.

        Raises `CacheError` for rows that are not written yet.
        """
        read = self.read_stored(rows)
        return [tensor.to(column.dtype) for column, tensor in zip(self._layout.columns, read, strict=True)]

    def read_stored(self, rows: Tensor | Sequence[int]) -> list[Tensor]:
        """Return copies of rows with the dtypes that are on disk; raises what `read` raises."""
        self._check_open()
        places = torch.as_tensor(rows, dtype=torch.int64, device=HOST)
        wrong = places[(places < 0) | (places >= self._num_done)]
        if len(wrong):
            raise CacheError(
                f"row {int(wrong[0])} is not in {self._place}, which has the rows below {self._num_done}; fill it first"
            )
        read = [torch.empty((len(places), *c.shape), dtype=c.stored) for c in self._layout.columns]
        files = places // self._layout.rows_per_file
        for file in files.unique().tolist():
            (here,) = torch.where(files == file)
            local = places[here] - file * self._layout.rows_per_file
            for target, source in zip(read, self._map(file), strict=True):
                target[here] = source[local]
        return read

    def _map(self, file: int) -> list[Tensor]:
        if file not in self._mapped:
            path = rows_path(self._place, file)
            self._mapped[file] = map_file(path, self._layout, file, shared=self._writable)
        return self._mapped[file]

    def close(self) -> None:
        """Release the files; rows since the last flush are lost."""
        self._open = False
        self._mapped.clear()
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def delete(self) -> None:
        """Remove the shard's files, and its own folder if that is then empty, and close it.

        Raises `CacheError`, and removes nothing, if the folder no longer belongs to this shard.
        """
        self._check_open(to_write=True)
        found = read_manifest(self._place)
        if found is None or not found.holds_same(self._manifest):
            raise CacheError(
                f"{self._place} now belongs to another cache, and nothing in it was removed; remove it by hand"
            )
        self._mapped.clear()
        with explained(self._place):
            remove_shard(self._place, found)
        self.close()

    def _check_open(self, *, to_write: bool = False) -> None:
        if not self._open:
            raise CacheError(f"the cache {self._place} is closed; open it again")
        if to_write and not self._writable:
            raise CacheError(f"{self._place} was opened to be read; its owner alone fills and deletes it")

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def room_needed(old: Shard | None, values: Values, stored: torch.dtype | None, num_rows: int) -> int:
    """Return the bytes on disk while a new shard is filled from an old one, which is deleted only afterwards.

    Example:
        if room_needed(old, values, stored, old.num_rows) <= limit_bytes:
            new = Shard.create_or_resume(deeper, ..., limit_bytes=limit_bytes - old.num_bytes)

    The new one needs another folder: a folder holds one shard for each owner.
    """
    return make_layout(values, stored, num_rows).num_bytes + (0 if old is None else old.num_bytes)
