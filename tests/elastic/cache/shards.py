"""Shards for tests, and processes that work on them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.elastic.cache.shard import Shard

VALUES = [((3, 2), torch.float32), ((), torch.int64)]
SMALL_FILE = 100  # bytes: three rows of VALUES


def open_shard(folder: Path, num_rows: int = 8, **changed: Any) -> Shard:
    """Open a shard of `VALUES`, with some of its arguments changed."""
    arguments: dict[str, Any] = {
        "key": "k",
        "owner": 1,
        "values": VALUES,
        "stored": None,
        "limit_bytes": None,
    } | changed
    return Shard.create_or_resume(folder, num_rows=num_rows, **arguments)


def rows(first: int, count: int) -> list[Tensor]:
    """Return rows that differ from all others, bit for bit the same on every call."""
    numbers = torch.arange(first, first + count)
    return [(numbers[:, None, None] * 6 + torch.arange(6).view(3, 2)).float(), numbers * 7 - 2**40]


def check_rows(shard: Shard, count: int) -> None:
    """Check that a shard has these rows and no other ones."""
    assert shard.num_done == count
    for found, expected in zip(shard.read(range(count)), rows(0, count), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
