"""Layout of a shard's values in its files, and their size.

    0.rows   | value 0 of rows 0 to 99   | value 1 of rows 0 to 99   |
    1.rows   | value 0 of rows 100 to 149 | value 1 of rows 100 to 149 |

A row is in one file. Each value begins at a multiple of 64 bytes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.errors import CacheError
from penstock.tensors import aligned

FILE_BYTES = 256 * 2**20
STORED = (torch.float32, torch.bfloat16)

# for each value of a row its shape, without the batch, and its dtype
Values = Sequence[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One value of every row: its shape, its dtype when read, and the one on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.stored.itemsize


def make_columns(values: Values, stored: torch.dtype | None) -> tuple[Column, ...]:
    """Choose the stored dtype of each value of a row, given its shape and dtype.

    Example:
        make_columns([((197, 384), torch.float32), ((), torch.int64)], torch.bfloat16)

    Floats are stored as `stored` if that is smaller than their own dtype, everything else as it is. Raises `CacheError`
    for a dtype that floats cannot be stored as.
    """
    if stored is not None and stored not in STORED:
        raise CacheError(f"a cache must store floats as float32 or bfloat16; got {stored}; give one of these, or None")
    return tuple(
        Column(shape=tuple(shape), dtype=dtype, stored=_narrower(dtype, stored) if dtype.is_floating_point else dtype)
        for shape, dtype in values
    )


def _narrower(dtype: torch.dtype, stored: torch.dtype | None) -> torch.dtype:
    return stored if stored is not None and stored.itemsize < dtype.itemsize else dtype


def bytes_per_row(values: Values, stored: torch.dtype | None) -> int:
    """Return the bytes that one row takes on disk.

    >>> bytes_per_row([((3, 4), torch.float32), ((), torch.int64)], torch.bfloat16)
    32
    """
    return sum(column.row_bytes for column in make_columns(values, stored))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files of a shard: all have the same number of rows, but the last one may have fewer."""

    columns: tuple[Column, ...]
    num_rows: int
    rows_per_file: int

    @property
    def num_files(self) -> int:
        """Return the number of files."""
        return -(-self.num_rows // self.rows_per_file)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        if not self.num_files:
            return 0
        return (self.num_files - 1) * self.file_bytes(0) + self.file_bytes(self.num_files - 1)

    def rows_in(self, file: int) -> int:
        """Return the number of rows of a file."""
        return min(self.rows_per_file, self.num_rows - file * self.rows_per_file)

    def starts(self, file: int) -> list[int]:
        """Return the byte at which each value begins in a file."""
        starts, end = [], 0
        for column in self.columns:
            starts.append(aligned(end))
            end = starts[-1] + self.rows_in(file) * column.row_bytes
        return starts

    def file_bytes(self, file: int) -> int:
        """Return the bytes of a file; a file without values has one, since an empty file cannot be mapped."""
        if not self.columns:
            return 1
        return max(1, self.starts(file)[-1] + self.rows_in(file) * self.columns[-1].row_bytes)

    def spans(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Divide consecutive rows among the files: yield the file, the first row within it, and the number of rows."""
        while count:
            file, row = divmod(first, self.rows_per_file)
            here = min(count, self.rows_per_file - row)
            yield file, row, here
            first, count = first + here, count - here


def bfloat16_helps(layout: Layout) -> str:
    """Return the end of an error that suggests bfloat16, empty if that would not be smaller."""
    wide = any(c.stored.is_floating_point and c.stored.itemsize > torch.bfloat16.itemsize for c in layout.columns)
    return ", or store floats as bfloat16" if wide else ""


def make_layout(values: Values, stored: torch.dtype | None, num_rows: int) -> Layout:
    """Divide rows among files of at most about 256 MiB; a larger row has a separate file.

    Raises `CacheError` for a number of rows below zero and for a dtype that floats cannot be stored as.
    """
    if num_rows < 0:
        raise CacheError(
            f"a cache's number of rows must be at least 0; got {num_rows}; give the number of this process's samples"
        )
    columns = make_columns(values, stored)
    row_bytes = sum(column.row_bytes for column in columns)
    return Layout(columns=columns, num_rows=num_rows, rows_per_file=max(1, FILE_BYTES // max(1, row_bytes)))
