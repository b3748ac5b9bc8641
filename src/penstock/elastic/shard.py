"""A shard: the rows of the samples that one process owns, in a file that is mapped into memory.

    | value 0 of all rows | value 1 of all rows | ...    each begins at a multiple of 64 bytes

The file loses its name once every process that reads it has mapped it, so nothing is left of a run that is killed. A
file that a killed process was still filling is not locked, and the next run removes it.

Rows are read from mapped memory, but written with `pwrite` into reserved space: on a full disk, a store into mapped
memory would kill the process.
"""

import contextlib
import errno
import fcntl
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from penstock.errors import CacheError
from penstock.files import remove_unlocked, reserve
from penstock.tensors import HOST, aligned
from penstock.text import counted
from penstock.units import format_bytes

# for each value of a row, its shape (without the batch dimension) and its dtype
Values = Sequence[tuple[tuple[int, ...], torch.dtype]]
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Column:
    """A value that every row has: its shape, its dtype when read, and its dtype on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.stored.itemsize


def make_columns(values: Values, stored: torch.dtype | None) -> tuple[Column, ...]:
    """Choose the stored dtype of each value: floats as `stored` if that is smaller, other values unchanged.

    Example:
        make_columns([((197, 384), torch.float32), ((), torch.int64)], torch.bfloat16)
    """

    def narrower(dtype: torch.dtype) -> torch.dtype:
        narrows = stored is not None and dtype.is_floating_point and stored.itemsize < dtype.itemsize
        return stored if stored is not None and narrows else dtype

    return tuple(Column(tuple(shape), dtype, narrower(dtype)) for shape, dtype in values)


def bytes_per_row(values: Values, stored: torch.dtype | None) -> int:
    """Return the bytes that one row takes on disk.

    >>> bytes_per_row([((3, 4), torch.float32), ((), torch.int64)], torch.bfloat16)
    32
    """
    return sum(column.row_bytes for column in make_columns(values, stored))


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The rows of an owner and their offsets in its file."""

    owner: int
    num_rows: int
    columns: tuple[Column, ...]

    @cached_property
    def starts(self) -> list[int]:
        """Byte offset of each value, and the end of the last value."""
        starts, end = [], 0
        for column in self.columns:
            starts.append(aligned(end))
            end = starts[-1] + self.num_rows * column.row_bytes
        return [*starts, end]

    @property
    def num_bytes(self) -> int:
        """Size of the file; at least 1, since an empty file cannot be mapped."""
        return max(1, self.starts[-1])

    def path(self, folder: Path) -> Path:
        """Return the path of the file, while it has one."""
        return folder / f"shard-{self.owner}.rows"


class Shard:
    """A complete file of rows, one for each view of each sample that its process holds.

    Example:
        with Shard.open(folder, layout) as shard:
            (values,) = shard.read([7, 3])

    All errors are `CacheError` with a one-line message, so that a caller can continue without a cache.
    """

    def __init__(self, layout: ShardLayout, memory: Tensor) -> None:
        self.layout, num_rows = layout, layout.num_rows
        self._columns: list[Tensor] | None = [
            memory.narrow(0, start, num_rows * column.row_bytes).view(column.stored).view(num_rows, *column.shape)
            for column, start in zip(layout.columns, layout.starts, strict=False)
        ]

    @classmethod
    def open(cls, folder: Path, layout: ShardLayout) -> "Shard":
        """Open a complete shard, of this process or of another process on this machine.

        The shard stays readable when the file loses its name. Raises `CacheError` if the file is missing or has
        another size than `layout`.
        """
        return cls(layout, _map(layout.path(folder), layout))

    @property
    def values(self) -> Values:
        """Shape and dtype of each value of a row, as `read` returns it."""
        return [(column.shape, column.dtype) for column in self.layout.columns]

    @property
    def stored_values(self) -> Values:
        """Shape and dtype of each value of a row, as stored."""
        return [(column.shape, column.stored) for column in self.layout.columns]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, as stored."""
        return sum(column.row_bytes for column in self.layout.columns)

    def read(self, rows: Tensor | Sequence[int]) -> list[Tensor]:
        """Return copies of rows by index, in any order: one tensor for each value."""
        read = self.read_stored(rows)
        return [tensor.to(column.dtype) for column, tensor in zip(self.layout.columns, read, strict=True)]

    def read_stored(self, rows: Tensor | Sequence[int]) -> list[Tensor]:
        """Return copies of rows with the dtypes on disk; raises `CacheError` for rows that do not exist."""
        if self._columns is None:
            raise CacheError(f"the shard of rank {self.layout.owner} is closed; open it again")
        places = torch.as_tensor(rows, dtype=torch.int64, device=HOST)
        wrong = places[(places < 0) | (places >= self.layout.num_rows)]
        if len(wrong):
            raise CacheError(
                f"a row must be from 0 to {self.layout.num_rows - 1}; got {int(wrong[0])}; pass only samples that this "
                "process owns"
            )
        return [column[places] for column in self._columns]

    def close(self) -> None:
        """Release the file."""
        self._columns = None

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class ShardFile:
    """The file of a new shard, which has a name, and is locked, while the block runs.

    Processes that have mapped the file by then can read it afterwards.

    Example:
        with ShardFile(folder, layout, limit_bytes=None) as file:
            file.append(frozen(batch))
            shard = file.shard()

    Raises `CacheError` if the folder cannot be written or has too little space, or if `limit_bytes` is exceeded.
    """

    def __init__(self, folder: Path, layout: ShardLayout, limit_bytes: int | None) -> None:
        self._folder, self._layout, self._limit_bytes = folder, layout, limit_bytes
        self._path, self._num_done = layout.path(folder), 0
        self._ends = contextlib.ExitStack()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "ShardFile":
        layout, limit = self._layout, self._limit_bytes
        if limit is not None and layout.num_bytes > limit:
            raise CacheError(
                f"this process's part of the cache needs {format_bytes(layout.num_bytes)}, but its share of the limit "
                f"is {format_bytes(max(0, limit))}; set a larger limit{_bfloat16_helps(layout)}"
            )
        with _explained(self._path), contextlib.ExitStack() as ends:
            self._folder.mkdir(parents=True, exist_ok=True)
            ends.callback(self._leave)
            self._file = ends.enter_context(self._path.open("xb"))
            ends.callback(self._path.unlink, missing_ok=True)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            _reserve(self._file, self._path, layout)
            self._ends = ends.pop_all()
        return self

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # the folder has files of other processes
            self._folder.rmdir()

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Append rows, one tensor for each value, on any device; raises `CacheError` if they do not match."""
        count = _check_rows(tensors, self._layout, self._layout.num_rows - self._num_done)
        if self._file is not None:
            with _explained(self._path):
                _write_rows(self._file, self._layout, self._num_done, tensors)
        self._num_done += count

    def shard(self) -> Shard:
        """Return the shard; raises `CacheError` if rows are missing."""
        if self._num_done < self._layout.num_rows:
            raise CacheError(f"{self._path} has {self._num_done} of {self._layout.num_rows} rows; fill it again")
        return Shard.open(self._folder, self._layout)

    def __exit__(self, *_error: object) -> None:
        with _explained(self._path):
            self._ends.close()


def remove_abandoned(base: Path) -> None:
    """Remove files that killed processes were filling in folders of `base`."""

    def remove(path: Path) -> None:
        path.unlink()
        path.parent.rmdir()

    remove_unlocked(base.glob("*/shard-*.rows"), remove=remove)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert an `OSError` of the block to a `CacheError` with a one-line message."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"the cache {error.filename or path} cannot be written ({error.strerror or error}); free space, "
            "choose another folder, or train without a cache"
        ) from error


def _map(path: Path, layout: ShardLayout) -> Tensor:
    """Map a file into memory; raises `CacheError` if it is missing or has another length."""
    try:
        found = path.stat().st_size  # torch would extend a short file with zeros
        if found != layout.num_bytes:
            raise CacheError(f"{path} is damaged: expected {layout.num_bytes} bytes, got {found}; fill it again")
        # the mapping keeps no descriptor open
        return torch.from_file(str(path), shared=False, size=layout.num_bytes, dtype=torch.uint8, device=HOST)
    except OSError as error:
        raise CacheError(f"{path} holds no cache ({error.strerror}); fill it first") from None
    except RuntimeError as error:
        raise CacheError(f"{path} cannot be read ({str(error).splitlines()[0]}); fill it again") from None


def _reserve(file: IO[bytes], path: Path, layout: ShardLayout) -> None:
    """Reserve a file's space; raises `CacheError` if the disk has too little, before writing any rows."""
    disk = shutil.disk_usage(path.parent)
    try:
        reserve(file, layout.num_bytes)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CacheError(
            f"the cache needs {format_bytes(layout.num_bytes)}, but the disk of {path} has {format_bytes(disk.free)} "
            f"left ({error.strerror}); free space, or choose another folder{_bfloat16_helps(layout)}"
        ) from error


def _bfloat16_helps(layout: ShardLayout) -> str:
    """Return the suggestion to store bfloat16, for the end of an error; empty if that would not be smaller."""
    wide = any(c.stored.is_floating_point and c.stored.itemsize > torch.bfloat16.itemsize for c in layout.columns)
    return ", or store floats as bfloat16" if wide else ""


def _check_rows(tensors: Sequence[Tensor], layout: ShardLayout, missing: int) -> int:
    """Return the number of rows of a batch; raises `CacheError` if they cannot be the next rows."""
    expected = [(column.shape, column.dtype) for column in layout.columns]
    found = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
    counts = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors}
    if found != expected or len(counts) != 1 or -1 in counts:
        shown = [(list(tensor.shape), tensor.dtype) for tensor in tensors]
        raise CacheError(
            f"a batch must have one tensor for each value, with a dimension of rows before the value's shape; the "
            f"values are {expected}, got {shown}; fill the cache again"
        )
    (count,) = counts
    if count > missing:
        raise CacheError(
            f"a cache has {counted(missing, 'row')} left to fill; got {count}; pass only samples that this process owns"
        )
    return count


def _write_rows(file: IO[bytes], layout: ShardLayout, first: int, tensors: Sequence[Tensor]) -> None:
    """Write consecutive rows of each value; raises `OSError` if this fails."""
    for column, start, tensor in zip(layout.columns, layout.starts, tensors, strict=False):
        stored = tensor.detach().to(device=HOST, dtype=column.stored).contiguous()
        rest = stored.reshape(-1).view(torch.uint8).numpy().data
        at = start + first * column.row_bytes
        while rest:
            written = os.pwrite(file.fileno(), rest, at)
            rest, at = rest[written:], at + written


_BYTES = 8 * 2**20
_ROW_BYTES = 64 * 2**10
_ROUNDS = 3


@cache
def copy_s_per_byte() -> float:
    """Measure the seconds per byte of copying scattered rows, as from a mapped file that is in memory.

    Reading from a slower disk takes longer, but the cache is read ahead of training.
    """
    rows = torch.zeros(_BYTES // _ROW_BYTES, _ROW_BYTES, dtype=torch.uint8)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        rows[order].clone()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) / _BYTES
