"""Schedules as data: for each device the actions it takes, in order.

An action is `F3.1`: forward of microbatch 3 on stage 1. A device that holds one stage may leave the
stage out. The executor runs such a list; whatever else reads schedules reads the same list.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a device: what to do, for which microbatch, on which stage."""

    kind: Literal["F"]
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.stage}"


def forward_only(stages: Sequence[int], num_microbatches: int | None = None) -> Iterator[Action]:
    """Forwards without end: inference. A device with several stages takes each microbatch through all of them.

    >>> text(forward_only([2, 3], num_microbatches=2))
    'F0.2 F0.3 F1.2 F1.3'
    """
    for microbatch in count() if num_microbatches is None else range(num_microbatches):
        for stage in stages:
            yield Action("F", microbatch, stage)


def text(actions: Iterable[Action]) -> str:
    """Write a finite schedule on one line."""
    return " ".join(str(action) for action in actions)
