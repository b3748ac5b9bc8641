"""A short piece of work that says how fast a device is, whatever model it will run."""

import time

import torch
from torch.nn import functional

BLOCKS, _ROWS, _WIDTH = 12, 197, 384


def calibrate(
    seconds: float = 1.0, *, threads: int = 1, by_cpu: bool = False, rounds: int = 3, blocks: int = BLOCKS
) -> float:
    """Return the seconds that one round of a small transformer's matrix products takes here.

    The weights, 4.7 MB for each of its `blocks`, do not fit in most caches, as a model's do not. Rounds are repeated
    for at least `seconds`, so a CPU quota that comes in short slices evens out, and at least `rounds` times, after a
    quarter of that to warm up; `by_cpu` counts this thread's own CPU seconds.

    Example:
        speed = profile.calibration_s / calibrate()
    """
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weights = [
        (torch.randn(4 * _WIDTH, _WIDTH, generator=generator), torch.randn(_WIDTH, 4 * _WIDTH, generator=generator))
        for _ in range(blocks)
    ]
    rows = torch.randn(_ROWS, _WIDTH, generator=generator)
    clock = time.thread_time if by_cpu else time.perf_counter
    with torch.inference_mode():
        _rounds(rows, weights, seconds / 4, 1)  # a process that has just begun is some percent slower
        begin = clock()
        done = _rounds(rows, weights, seconds, rounds)
        return (clock() - begin) / done


def _rounds(rows: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]], seconds: float, least: int) -> int:
    """Do rounds for so long, and at least so many; tells how many."""
    begin, done = time.perf_counter(), 0
    while done < least or time.perf_counter() - begin < seconds:
        _round(rows, weights)
        done += 1
    return done


def _round(rows: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for up, down in weights:
        hidden = functional.gelu(functional.linear(functional.layer_norm(rows, (_WIDTH,)), up))
        functional.linear(hidden, down)
