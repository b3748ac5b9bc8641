"""Counters of each stage's messages and actions, shared by heartbeats, stall watch, live view and reports.

A process sends them with every heartbeat. If more messages were sent than taken, some are in flight, or lost:

    driver sent 3 ──▶ stage 0 took 3, sent 3 ──▶ stage 1 took 2, sent 2 ──▶ driver took 2
                                              ^ here
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from penstock.errors import TransportError
from penstock.group.calls import MOST_OF_CALL

ACTIVATIONS, GRADIENTS = "activations", "gradients"
COMPUTING = "computing"
_Count = Annotated[int, msgspec.Meta(ge=0)]


def _none() -> dict[str, int]:
    return {ACTIVATIONS: 0, GRADIENTS: 0}


class Counters(msgspec.Struct, forbid_unknown_fields=True):
    """Counts of one stage on one device: messages by kind, their bytes, and actions, including the ends of streams.

    `doing` is the kind of message that the stage waits for, `COMPUTING`, or empty.
    """

    sent: dict[str, _Count] = msgspec.field(default_factory=_none)
    taken: dict[str, _Count] = msgspec.field(default_factory=_none)
    num_run: _Count = 0
    sent_bytes: _Count = 0  # sent over links
    busy_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # seconds of computing
    # seconds of computing at the sustained speed: under a CPU quota, a process that was idle computes faster for a
    # while
    needed_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    doing: str = ""

    def __post_init__(self) -> None:
        if not self.sent.keys() == self.taken.keys() == _none().keys():
            raise ValueError(f"counts must be by kind, {ACTIVATIONS} and {GRADIENTS}")


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="stages", forbid_unknown_fields=True):
    """Progress report of a process: busy flag, finished transport waits, and the counts of its stages."""

    job: _Count
    rank: _Count
    busy: bool
    num_moved: _Count
    stages: dict[_Count, Counters]
    call: Annotated[str, msgspec.Meta(max_length=MOST_OF_CALL)] = ""  # the current training call, with its number


def write_counters(
    job: int, rank: int, stages: Mapping[int, Counters], *, busy: bool = False, num_moved: int = 0, call: str = ""
) -> str:
    """Encode the counts of one process's stages as a heartbeat."""
    busy = busy or any(counters.doing == COMPUTING for counters in stages.values())
    beat = Heartbeat(job=job, rank=rank, busy=busy, num_moved=num_moved, stages=dict(stages), call=call)
    return msgspec.json.encode(beat).decode()


def read_counters(job: int, texts: Iterable[str]) -> list[Heartbeat]:
    """Decode the heartbeats of a job; raises `TransportError` for anything else."""
    try:
        beats = [msgspec.json.decode(text, type=Heartbeat) for text in texts if text]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise TransportError(f"a heartbeat cannot be decoded: {error}; start again") from None
    return [beat for beat in beats if beat.job == job]


def by_stage(beats: Iterable[Heartbeat]) -> dict[tuple[int, int], Counters]:
    """Return the counts by stage and rank."""
    return {(index, beat.rank): counters for beat in beats for index, counters in beat.stages.items()}
