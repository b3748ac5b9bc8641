"""Schedules as data: the actions of each device, in order.

An action is written `F3.1`: forward of microbatch 3 on stage 1. For a device with one stage, the stage may be omitted.
The executor and all other readers of schedules use the same list.

    F  forward
    B  backward: gradients of the inputs and of the weights
    I  backward for the inputs only; W  later, for the weights: the two halves of a B
    R  the forward again, for a stage that kept only its inputs
    S  gradients of a stage, summed over replicas and over stages that share a weight
    U  the optimizer's update of a stage's weights
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeAlias, get_args

Kind = Literal["F", "B", "I", "W", "R", "S", "U"]
KINDS: tuple[str, ...] = get_args(Kind)
# the halves of a split backward are assumed equal
BACKWARD_PARTS = {"B": 1.0, "I": 0.5, "W": 0.5}
# actions of a stage, not of one of its microbatches
STAGE_KINDS = frozenset({"S", "U"})


@dataclass(frozen=True, slots=True)
class Action:
    """A step of a device: the kind of action, the microbatch and the stage; S and U have microbatch 0."""

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.kind in STAGE_KINDS else self.microbatch}.{self.stage}"


# actions of each device, in order
Schedule: TypeAlias = tuple[tuple[Action, ...], ...]


def forward_only(stages: Sequence[int], num_microbatches: int | None = None) -> Iterator[Action]:
    """Yield forwards for inference, without end unless `num_microbatches` is set; each microbatch runs all stages.

    >>> text(forward_only([2, 3], num_microbatches=2))
    'F0.2 F0.3 F1.2 F1.3'
    """
    for microbatch in count() if num_microbatches is None else range(num_microbatches):
        for stage in stages:
            yield Action("F", microbatch, stage)


def text(actions: Iterable[Action]) -> str:
    """Format a finite schedule as one line."""
    return " ".join(str(action) for action in actions)


def placement(schedule: Schedule) -> dict[int, int]:
    """Return the device of every stage.

    >>> placement(((Action("F", 0, 0),), (Action("F", 0, 1),)))
    {0: 0, 1: 1}
    """
    return {action.stage: device for device, actions in enumerate(schedule) for action in actions}
