"""Speed of reading cached rows on this machine."""

import statistics
import time
from functools import cache

import torch

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
