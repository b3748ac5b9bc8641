"""Shards for tests, and processes that work on them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.elastic.shard import Shard, ShardFile, ShardLayout, Values, make_columns

VALUES: Values = [((3, 2), torch.float32), ((), torch.int64)]


def layout_of(
    num_rows: int = 8, *, owner: int = 1, values: Values = VALUES, stored: torch.dtype | None = None
) -> ShardLayout:
    """Return the layout of a shard of `VALUES`, with some of its arguments changed."""
    return ShardLayout(owner=owner, num_rows=num_rows, columns=make_columns(values, stored))


def fill_shard(folder: Path, num_rows: int = 8, *, limit_bytes: int | None = None, **changed: Any) -> Shard:
    """Write a shard of `rows`, three at a time, and open it; its file has no name afterwards."""
    with ShardFile(folder, layout_of(num_rows, **changed), limit_bytes) as file:
        for first in range(0, num_rows, 3):
            file.append(rows(first, min(3, num_rows - first)))
        return file.shard()


def rows(first: int, count: int) -> list[Tensor]:
    """Return rows that differ from all others, bit for bit the same on every call."""
    numbers = torch.arange(first, first + count)
    return [(numbers[:, None, None] * 6 + torch.arange(6).view(3, 2)).float(), numbers * 7 - 2**40]


def check_rows(shard: Shard, count: int = 8) -> None:
    """Check that a shard has these rows and no other ones."""
    assert shard.layout.num_rows == count
    for found, expected in zip(shard.read(range(count)), rows(0, count), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
