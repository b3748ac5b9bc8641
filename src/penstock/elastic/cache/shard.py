"""A shard: the rows of the samples that one process owns, in a file that is mapped into memory.

    folder/
        shard-0.rows    | value 0 of all rows | value 1 of all rows | ...    each begins at a multiple of 64 bytes
        shard-0.done    the mark: a description of the rows, and the checksum of their file
        shard-1.rows    the shard of another process on this machine, which can be read

A file is renamed to its final name once all rows are on the disk, then the mark is written. If the mark is missing or
differs from the expected mark, the file is recomputed.

Rows are read from mapped memory, but written with `pwrite` into reserved space: on a full disk, a store into mapped
memory would kill the process.
"""

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import Tensor

from penstock.errors import CacheError
from penstock.files import reserve, write_whole, written_whole
from penstock.tensors import HOST, aligned, sum_words
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
class Layout:
    """The rows of an owner and their offsets in its file; `key` is the name of the cache (see `cache_key`)."""

    key: str
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

    def rows_path(self, folder: Path) -> Path:
        """Return the path of the file."""
        return folder / f"shard-{self.owner}.rows"

    def mark_path(self, folder: Path) -> Path:
        """Return the path of the file's mark."""
        return folder / f"shard-{self.owner}.done"

    def mark(self, checksum: int) -> bytes:
        """Return the contents of the mark."""
        values = [[list(column.shape), str(column.dtype), str(column.stored)] for column in self.columns]
        return msgspec.json.encode([self.key, self.owner, self.num_rows, values, str(checksum)])


class Shard:
    """A complete file of rows, one for each view of each sample that its process holds.

    Example:
        with writing(folder, layout, limit_bytes=None) as append:
            append(frozen(batch))
        with Shard.open(folder, layout) as shard:
            (values,) = shard.read([7, 3])

    All errors are `CacheError` with a one-line message, so that a caller can continue without a cache.
    """

    def __init__(self, folder: Path, layout: Layout, memory: Tensor) -> None:
        self.layout, self._folder, num_rows = layout, folder, layout.num_rows
        self._columns: list[Tensor] | None = [
            memory.narrow(0, start, num_rows * column.row_bytes).view(column.stored).view(num_rows, *column.shape)
            for column, start in zip(layout.columns, layout.starts, strict=False)
        ]

    @classmethod
    def open(cls, folder: Path, layout: Layout) -> "Shard":
        """Open a complete shard, of this process or of another process on this machine.

        The shard stays readable if its owner deletes it. Raises `CacheError` if the shard is missing, unfinished or
        damaged, or does not match `layout`.
        """
        path = layout.rows_path(folder)
        memory = _map(path, layout)
        try:
            mark = layout.mark_path(folder).read_bytes()
        except OSError as error:
            raise CacheError(
                f"{path} is not finished: its mark cannot be read ({error.strerror}); fill it first"
            ) from None
        if mark != layout.mark(sum_words(memory)):
            raise CacheError(f"{path} is damaged, or its rows belong to another cache; fill it again")
        return cls(folder, layout, memory)

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
            raise CacheError(f"the cache {self.layout.rows_path(self._folder)} is closed; open it again")
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

    def delete(self) -> None:
        """Remove the file and close it; raises `CacheError` if it cannot be removed."""
        self.close()
        remove(self._folder, self.layout)

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@contextlib.contextmanager
def writing(
    folder: Path, layout: Layout, limit_bytes: int | None
) -> Iterator[Callable[[Sequence[Tensor]], None]]:  # fmt: skip
    """Context manager that writes a new shard; it yields a function that appends rows.

    The function takes one tensor for each value, with rows as its first dimension, on any device. The shard is complete
    if all rows have been appended when the block ends. The owner's old file is removed first. If the block fails, its
    file is removed; the file of a killed process is removed by the next writer.

    Raises `CacheError` if the folder cannot be written or has too little space, if `limit_bytes` is exceeded, and if
    rows do not match the layout.
    """
    if limit_bytes is not None and layout.num_bytes > limit_bytes:
        raise CacheError(
            f"this process's part of the cache needs {format_bytes(layout.num_bytes)}, but its share of the limit is "
            f"{format_bytes(max(0, limit_bytes))}; set a larger limit{_bfloat16_helps(layout)}"
        )
    path, num_done = layout.rows_path(folder), 0
    with contextlib.ExitStack() as stack:
        with _explained(path):
            folder.mkdir(parents=True, exist_ok=True)
            remove(folder, layout)
            file = stack.enter_context(written_whole(path))
            _reserve(file, path, layout)

        def append(tensors: Sequence[Tensor]) -> None:
            nonlocal num_done
            count = _check_rows(tensors, layout, layout.num_rows - num_done)
            with _explained(path):
                _write_rows(file, layout, num_done, tensors)
            num_done += count

        yield append
        if num_done < layout.num_rows:
            raise CacheError(f"{path} has {num_done} of {layout.num_rows} rows; fill it again")
        with _explained(path):
            stack.close()
    checksum = sum_words(_map(path, layout))
    with _explained(path):
        write_whole(layout.mark_path(folder), layout.mark(checksum))


def remove(folder: Path, layout: Layout) -> None:
    """Remove an owner's file, the mark first; raises `CacheError` if this fails."""
    with _explained(layout.rows_path(folder)):
        layout.mark_path(folder).unlink(missing_ok=True)
        layout.rows_path(folder).unlink(missing_ok=True)


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


def _map(path: Path, layout: Layout) -> Tensor:
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


def _reserve(file: IO[bytes], path: Path, layout: Layout) -> None:
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


def _bfloat16_helps(layout: Layout) -> str:
    """Return the suggestion to store bfloat16, for the end of an error; empty if that would not be smaller."""
    wide = any(c.stored.is_floating_point and c.stored.itemsize > torch.bfloat16.itemsize for c in layout.columns)
    return ", or store floats as bfloat16" if wide else ""


def _check_rows(tensors: Sequence[Tensor], layout: Layout, missing: int) -> int:
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


def _write_rows(file: IO[bytes], layout: Layout, first: int, tensors: Sequence[Tensor]) -> None:
    """Write consecutive rows of each value; raises `OSError` if this fails."""
    for column, start, tensor in zip(layout.columns, layout.starts, tensors, strict=False):
        stored = tensor.detach().to(device=HOST, dtype=column.stored).contiguous()
        rest = stored.reshape(-1).view(torch.uint8).numpy().data
        at = start + first * column.row_bytes
        while rest:
            written = os.pwrite(file.fileno(), rest, at)
            rest, at = rest[written:], at + written
