"""What every stage has sent, taken and done so far: one set of counts for heartbeats, stall watch, live view, reports.

A process says them with every heartbeat. Where more was sent than taken, messages are on their way, or lost:

    feeder sent 3 ──▶ stage 0 took 3, sent 3 ──▶ stage 1 took 2, sent 2 ──▶ feeder took 2
                                              ^ here
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from penstock.errors import TransportError

ACTIVATIONS, GRADIENTS = "activations", "gradients"
COMPUTING = "computing"
_Count = Annotated[int, msgspec.Meta(ge=0)]


def _none() -> dict[str, int]:
    return {ACTIVATIONS: 0, GRADIENTS: 0}


class Counters(msgspec.Struct, forbid_unknown_fields=True):
    """One stage's messages by kind, their bytes, and its actions so far on one device, streams' ends included.

    `doing` is the kind of message that it waits for, `COMPUTING`, or nothing.
    """

    sent: dict[str, _Count] = msgspec.field(default_factory=_none)
    taken: dict[str, _Count] = msgspec.field(default_factory=_none)
    num_run: _Count = 0
    sent_bytes: _Count = 0  # over a link
    busy_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # of computing
    # and of that without a pause: beneath a CPU quota whoever rests computes faster than it could for long
    needed_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    doing: str = ""

    def __post_init__(self) -> None:
        if not self.sent.keys() == self.taken.keys() == _none().keys():
            raise ValueError(f"messages are counted by kind, {ACTIVATIONS} and {GRADIENTS}")


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="stages", forbid_unknown_fields=True):
    """What one process says of itself: whether it is busy, what its transport has moved, its stages' counts."""

    job: _Count
    rank: _Count
    busy: bool
    num_moved: _Count
    stages: dict[_Count, Counters]
    call: Annotated[str, msgspec.Meta(max_length=80)] = ""  # what a process that trains calls, with its number


def write_counters(
    job: int, rank: int, stages: Mapping[int, Counters], *, busy: bool = False, num_moved: int = 0,
    call: str = "",
) -> str:  # fmt: skip
    """Write what the stages of one process have counted."""
    busy = busy or any(counters.doing == COMPUTING for counters in stages.values())
    beat = Heartbeat(job=job, rank=rank, busy=busy, num_moved=num_moved, stages=dict(stages), call=call)
    return msgspec.json.encode(beat).decode()


def read_counters(job: int, texts: Iterable[str]) -> list[Heartbeat]:
    """Read what processes said of a job's stages; raises `TransportError` for anything else."""
    try:
        beats = [msgspec.json.decode(text, type=Heartbeat) for text in texts if text]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise TransportError(f"a heartbeat does not say how far stages are: {error}; start again") from None
    return [beat for beat in beats if beat.job == job]


def by_stage(beats: Iterable[Heartbeat]) -> dict[tuple[int, int], Counters]:
    """Return what was counted, by stage and rank."""
    return {(index, beat.rank): counters for beat in beats for index, counters in beat.stages.items()}
