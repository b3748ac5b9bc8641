"""Where rows lie in files, and how much room they take."""

import pytest
import torch

from penstock.elastic.cache import layout
from penstock.elastic.cache.layout import bytes_per_row, make_columns, make_layout
from penstock.errors import CacheError


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),  # as exact in half the room
        (torch.float16, torch.bfloat16, torch.float16),
        (torch.int64, torch.bfloat16, torch.int64),
        (torch.bool, torch.float32, torch.bool),
    ],
)
def test_floats_are_stored_narrower_and_nothing_else(
    dtype: torch.dtype, stored: torch.dtype | None, expected: torch.dtype
) -> None:
    (column,) = make_columns([((2,), dtype)], stored)
    assert (column.dtype, column.stored) == (dtype, expected)


def test_bytes_of_a_row() -> None:
    values = [((197, 384), torch.float32), ((), torch.int64), ((0, 5), torch.float32), ((3,), torch.bool)]
    assert bytes_per_row(values, None) == 197 * 384 * 4 + 8 + 3
    assert bytes_per_row(values, torch.bfloat16) == 197 * 384 * 2 + 8 + 3
    assert bytes_per_row([], None) == 0
    with pytest.raises(CacheError, match=r"float32 or bfloat16; got torch\.int8"):
        bytes_per_row(values, torch.int8)


def test_rows_are_not_divided_between_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "FILE_BYTES", 100)
    one = make_layout([((5,), torch.float32), ((), torch.int64)], None, 8)
    assert (one.rows_per_file, one.num_files) == (3, 3)
    assert [one.rows_in(file) for file in range(3)] == [3, 3, 2]
    assert one.starts(0) == [0, 64]
    assert [one.file_bytes(file) for file in range(3)] == [88, 88, 80]
    assert one.num_bytes == 256
    assert list(one.spans(2, 5)) == [(0, 2, 1), (1, 0, 3), (2, 0, 1)]
    assert make_layout([((50,), torch.float32)], None, 2).rows_per_file == 1


@pytest.mark.parametrize("values", [[], [((0,), torch.float32)]])
def test_rows_without_bytes(values: layout.Values) -> None:
    assert make_layout(values, None, 3).num_bytes == 1
    assert make_layout(values, None, 0).num_bytes == 0


def test_a_number_of_rows_below_zero() -> None:
    with pytest.raises(CacheError, match=r"at least 0; got -1;"):
        make_layout([], None, -1)
