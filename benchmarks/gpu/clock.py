"""Seconds of work on a device, and rows of results."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from penstock.text import first_line

Row = dict[str, Any]
REPEATS = 20


def seconds(device: torch.device, call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the median seconds of a call after one that is not counted; on a GPU between two events."""
    call()
    if device.type != "cuda":
        return statistics.median(_wall(call) for _ in range(repeats))
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(taken)


def first_seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of one call, as of a first one that compiles."""
    begin = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - begin


def settle(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def around(measures: Mapping[str, Callable[[], float]], first: str) -> dict[str, float | None]:
    """Measure each in turn and the first one once more; its value is the mean of both, and None if it fails."""
    found = {name: tried(name, measure) for name, measure in measures.items()}
    if (before := found[first]) is not None and (after := tried(first, measures[first])) is not None:
        found[first] = (before + after) / 2
    return found


def tried(name: str, measure: Callable[[], float]) -> float | None:
    """Return the seconds of a system; None if it fails, which is printed and does not end the others."""
    try:
        return measure()
    # a peer or a stage may fail in any way
    except Exception as error:
        print(f"failed: {name}: {type(error).__name__}: {first_line(error)}", file=sys.stderr, flush=True)
        return None


def per_second(found: Mapping[str, float | None], amount: float = 1) -> dict[str, float | None]:
    """Return rates from seconds."""
    return {name: amount / taken if taken else None for name, taken in found.items()}


def ceilings(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    """Yield the bandwidth of a copy on the device, and the speed of a product of bfloat16 matrices."""
    num, size = (2**20, 256) if tiny else (2**30, 8192)
    source = torch.ones(num, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = seconds(device, lambda: target.copy_(source))
    yield {"section": "ceilings", "subject": f"copy of {num} bytes", "bytes_per_s": 2 * num / taken}
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    taken = seconds(device, lambda: left @ right)
    yield {"section": "ceilings", "subject": f"product of {size} x {size} bf16", "flops_per_s": 2 * size**3 / taken}


def _wall(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
