"""Interleaved 1F1B: several stages per device, far apart in the model, so that the bubble shrinks by their number."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from penstock.plan.schedule.actions import NUM_BUFFERS, Action, Kind, Schedule

# a microbatch on a stage
_Work = tuple[int, int]
_T = TypeVar("_T")


def interleaved_1f1b(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Make 1F1B over stages that go round-robin to the devices (Narayanan et al. 2021, Megatron-LM).

        device 0 of 2, stages 0 and 2:  F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 ...

    As many microbatches as there are devices go through a device's first stage, then through its next.
    Where microbatches or stages do not divide by the devices, the paper gives no order: devices then
    take what comes first in the paper's order and can be done, a backward before a forward.
    """
    groups = [
        range(first, min(first + num_devices, num_microbatches)) for first in range(0, num_microbatches, num_devices)
    ]
    forwards, backwards, ahead = [], [], []
    for device in range(num_devices):
        stages = range(device, num_stages, num_devices)
        forwards.append([(m, s) for group in groups for s in stages for m in group])
        backwards.append([(m, s) for group in groups for s in reversed(stages) for m in group])
        ahead.append(2 * (num_devices - device - 1) + (len(stages) - 1) * num_devices)
    if num_stages % num_devices or num_microbatches % num_devices:
        return _as_soon_as_possible(forwards, backwards, [number + 1 for number in ahead], num_stages)
    return tuple(
        tuple(Action(kind, m, s) for kind, (m, s) in alternate(f, b, min(n, len(f))))
        for f, b, n in zip(forwards, backwards, ahead, strict=True)
    )


def alternate(forwards: Sequence[_T], backwards: Sequence[_T], ahead: int) -> Iterator[tuple[Kind, _T]]:
    """Yield `ahead` forwards, then a forward and a backward by turns, then the remaining backwards.

    >>> list(alternate("ab", "ab", 1))
    [('F', 'a'), ('F', 'b'), ('B', 'a'), ('B', 'b')]
    """
    remaining = iter(forwards)
    yield from (("F", work) for work in islice(remaining, ahead))
    for work in backwards:
        yield from (("F", following) for following in islice(remaining, 1))
        yield "B", work


def _as_soon_as_possible(
    forwards: Sequence[Sequence[_Work]], backwards: Sequence[Sequence[_Work]], most: Sequence[int], num_stages: int
) -> Schedule:
    """Play the devices tick by tick: a backward if its gradient is there, else a forward while memory lasts."""
    done: set[tuple[Kind, int, int]] = set()
    to_forward, to_backward = list(map(list, forwards)), list(map(list, backwards))
    devices: list[list[Action]] = [[] for _ in most]
    held = [0] * len(most)
    limits = list(most)
    passed: Counter[tuple[Kind, int]] = Counter()
    while any(to_backward):
        tick: list[tuple[int, Action]] = []
        for device, limit in enumerate(limits):
            back = next((w for w in to_backward[device] if _backward_ready(*w, num_stages, done, passed)), None)
            ahead = next((w for w in to_forward[device] if _forward_ready(*w, num_stages, done, passed)), None)
            if back is not None:
                to_backward[device].remove(back)
                tick.append((device, Action("B", *back)))
            elif ahead is not None and held[device] < limit:
                to_forward[device].remove(ahead)
                tick.append((device, Action("F", *ahead)))
        if not tick:  # the paper's memory is too little for these counts
            limits = [limit + 1 for limit in limits]
        for device, action in tick:
            done.add((action.kind, action.microbatch, action.stage))
            passed[action.kind, action.stage] += 1
            devices[device].append(action)
            held[device] += 1 if action.kind == "F" else -1
    return tuple(map(tuple, devices))


def _forward_ready(
    microbatch: int, stage: int, num_stages: int, done: set[tuple[Kind, int, int]], passed: Counter[tuple[Kind, int]]
) -> bool:
    # who cannot pass its result on does nothing else: the buffers of a cut are part of the order
    full = stage + 1 < num_stages and passed["F", stage] - passed["F", stage + 1] >= NUM_BUFFERS
    return not full and (stage == 0 or ("F", microbatch, stage - 1) in done)


def _backward_ready(
    microbatch: int, stage: int, num_stages: int, done: set[tuple[Kind, int, int]], passed: Counter[tuple[Kind, int]]
) -> bool:
    full = stage > 0 and passed["B", stage] - passed["B", stage - 1] >= NUM_BUFFERS
    later = stage == num_stages - 1 or ("B", microbatch, stage + 1) in done
    return not full and later and ("F", microbatch, stage) in done
