"""What every stage has sent, taken and done so far: one set of counts for heartbeats, stall watch, live view, reports.

A process says them with every heartbeat. Where more was sent than taken, messages are on their way, or lost:

    feeder sent 3 ──▶ stage 0 took 3, sent 3 ──▶ stage 1 took 2, sent 2 ──▶ feeder took 2
                                              ^ here
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from penstock.errors import TransportError

ACTIVATIONS, GRADIENTS = "activations", "gradients"
COMPUTING = "computing"
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Pair = tuple[_Count, _Count]
_Doing = Literal["", "activations", "gradients", "computing"]
# of a stage: its index, activations and gradients sent, and taken, actions run, seconds of computing, what it is at
_Counted = tuple[_Count, _Pair, _Pair, _Count, Annotated[float, msgspec.Meta(ge=0)], _Doing]


def _none() -> dict[str, int]:
    return {ACTIVATIONS: 0, GRADIENTS: 0}


def _by_kind(pair: _Pair) -> dict[str, int]:
    return dict(zip((ACTIVATIONS, GRADIENTS), pair, strict=True))


@dataclass(slots=True)
class Counters:
    """One stage's messages by kind and its actions so far on one device, streams' ends included.

    `doing` is the kind of message that it waits for, `COMPUTING`, or nothing.
    """

    sent: dict[str, int] = field(default_factory=_none)
    taken: dict[str, int] = field(default_factory=_none)
    num_run: int = 0
    busy_s: float = 0.0  # of computing
    doing: str = ""


@dataclass(slots=True)
class Heard:
    """What one process said of itself last: whether it is busy, what its transport has moved, its stages' counts."""

    rank: int
    busy: bool
    num_moved: int
    stages: dict[int, Counters]


def write_counters(
    job: int, rank: int, stages: Mapping[int, Counters], *, busy: bool = False, num_moved: int = 0
) -> str:
    """Write what the stages of one process have counted."""
    counted = [
        [index, list(c.sent.values()), list(c.taken.values()), c.num_run, round(c.busy_s, 3), c.doing]
        for index, c in stages.items()
    ]
    return json.dumps([job, rank, busy or any(c.doing == COMPUTING for c in stages.values()), num_moved, counted])


def read_counters(job: int, texts: Iterable[str]) -> list[Heard]:
    """Read what processes said of a job's stages; raises `TransportError` for anything else."""
    heard = []
    for text in texts:
        if not text:
            continue
        try:
            said, rank, busy, num_moved, counted = msgspec.json.decode(
                text, type=tuple[_Count, _Count, bool, _Count, list[_Counted]]
            )
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise TransportError(f"a heartbeat does not say how far stages are: {error}; start again") from None
        if said == job:
            stages = {
                index: Counters(
                    dict(zip(_none(), sent, strict=True)),
                    dict(zip(_none(), taken, strict=True)),
                    num_run,
                    busy_s,
                    doing,
                )
                for index, sent, taken, num_run, busy_s, doing in counted
            }
            heard.append(Heard(rank, busy, num_moved, stages))
    return heard


def by_stage(heard: Iterable[Heard]) -> dict[tuple[int, int], Counters]:
    """Return what was counted, by stage and rank."""
    return {(index, each.rank): counters for each in heard for index, counters in each.stages.items()}
