"""How far every stage is, and the difference between slow work and a message that was lost.

A process says with every heartbeat what its stages have counted. The feeder, while it waits, looks
for anything that moves: a count, or a stage that computes. Only when nothing has moved for `stall_s`
is a message lost, and the counts say where:

    feeder fed 3 ──▶ stage 0 took 3, passed 3 ──▶ stage 1 took 2, passed 2 ──▶ feeder got 2
                                               ^ here
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from penstock.errors import TransportError

STALL_S = 60.0
_Count = Annotated[int, msgspec.Meta(ge=0)]
# the job, the rank, and for each of its stages what `Progress` counts
_Said = tuple[_Count, _Count, list[tuple[_Count, _Count, _Count, _Count, Annotated[float, msgspec.Meta(ge=0)]]]]


@dataclass(slots=True)
class Progress:
    """One stage's messages so far on one device, streams' ends included."""

    taken: int = 0
    computed: int = 0
    passed: int = 0
    busy_s: float = 0.0  # of computing


def write_progress(job: int, rank: int, stages: Mapping[int, Progress]) -> str:
    """Write what the stages of one process have counted."""
    counted = [[index, p.taken, p.computed, p.passed, round(p.busy_s, 3)] for index, p in stages.items()]
    return json.dumps([job, rank, counted])


def read_progress(job: int, told: Iterable[str]) -> dict[tuple[int, int], Progress]:
    """Read what processes said of a job's stages, by stage and rank; raises `TransportError` for anything else."""
    stages: dict[tuple[int, int], Progress] = {}
    for text in told:
        if not text:
            continue
        try:
            said, rank, counted = msgspec.json.decode(text, type=_Said)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise TransportError(f"a heartbeat does not say how far stages are: {error}; start again") from None
        if said == job:
            stages.update({(index, rank): Progress(*counts) for index, *counts in counted})
    return stages


class StallWatch:
    """Watches, from the feeding process, whether anything moves.

    `holders` names for every stage the ranks that take turns on it, `listen` gives what all processes said
    last. The feeder counts `fed` and `got` itself, and calls `begin` when it starts to wait.

    Example:
        watch.begin()
        while not arrived(timeout_s=0.1):
            if (stalled := watch.check()) is not None:
                raise RunError(stalled)
    """

    def __init__(
        self, job: int, holders: Sequence[Mapping[int, str]], listen: Callable[[], Iterable[str]],
        stall_s: float = STALL_S,
    ) -> None:  # fmt: skip
        self.stall_s = stall_s
        self.fed = 0
        self.got = 0
        self._job = job
        self._holders = holders
        self._listen = listen
        self._seen: object = None
        self._since = time.monotonic()

    def begin(self) -> None:
        """Start to wait: time that the user's own code took does not count."""
        self._since = time.monotonic()

    def check(self) -> str | None:
        """Say what was lost, once nothing has moved for `stall_s`."""
        stages = read_progress(self._job, self._listen())
        seen = (self.fed, self.got, stages)
        busy = any(progress.taken > progress.computed for progress in stages.values())
        if busy or seen != self._seen:
            self._seen = seen
            self._since = time.monotonic()
        if time.monotonic() - self._since < self.stall_s:
            return None
        return self._explain(stages)

    def _explain(self, stages: Mapping[tuple[int, int], Progress]) -> str:
        """Find the first place where more went in than came out."""
        sent, sender = self.fed, "the feeding process"
        for index, devices in enumerate(self._holders):
            silent = [name for rank, name in devices.items() if (index, rank) not in stages]
            if silent:
                return self._sentence(f"stage {index} on {silent[0]}", "its program and weights", sender)
            name = f"stage {index} on {' and '.join(devices.values())}"
            taken = sum(stages[index, rank].taken for rank in devices)
            if taken < sent:
                return self._sentence(name, f"message {taken + 1} of {sent} to it", sender)
            sent, sender = sum(stages[index, rank].passed for rank in devices), name
        return self._sentence("the feeding process", f"result {self.got + 1}", sender)

    def _sentence(self, name: str, what: str, sender: str) -> str:
        return (
            f"{name} has waited {self.stall_s:g} s for {what}, and nothing computes: {sender} sent it, so it was "
            "lost; start again, with a larger stall_s if one message takes longer than that on the slowest link"
        )
