"""Play a recorded run again with other costs: what would the same work in the same order have taken?

A device does its jobs in order. For each it waits until its message is there, computes, waits for a free buffer and
passes the result on. A cut holds `depth` messages at the sender and as many at the receiver, as the engine's do:

    sent[k]   once it is made, the one before it is over, and the receiver has passed on message k - depth
    done[k]   not before message k - depth has been sent
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import DataError

# the stage that makes a message and the one that takes it
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One action of a device, in seconds: reading its message, computing, passing on, and what lies between.

    What it takes is a sum of parts by name, so that parts can be left out. `after` is what the device needs behind it
    before its next job, while nobody waits for it; it goes on while the device waits for a free buffer.
    """

    stage: int
    kind: str
    microbatch: int
    source: Edge | None
    target: Edge | None
    parts: Mapping[str, float]
    after: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, counted: frozenset[str]) -> float:
        """Add up the parts that count."""
        return _sum(self.parts, counted)


def _sum(parts: Mapping[str, float], counted: frozenset[str]) -> float:
    return sum(value for name, value in parts.items() if name in counted)


@dataclass(frozen=True, slots=True)
class Played:
    """When a job began, after its message had come, when it had been passed on, and when the device was free again."""

    job: Job
    begin_s: float
    end_s: float
    free_s: float


@dataclass(slots=True)
class _Player:
    devices: Sequence[Sequence[Job]]
    counted: frozenset[str]
    wires: Mapping[Edge, Sequence[float]]
    depth: int
    played: list[list[Played]]
    made: dict[Edge, list[float]]
    sent: dict[Edge, list[float]]
    taken: dict[Edge, list[float]]

    def sent_s(self, edge: Edge, number: int) -> float | None:
        """Return when a message is with its receiver; None while that is not known."""
        known = self.sent.setdefault(edge, [])
        made, taken = self.made.get(edge, []), self.taken.get(edge, [])
        while len(known) <= number:
            at = len(known)
            if at >= len(made):
                return None
            begin = max(made[at], known[-1] if known else 0.0)
            held = at - self.depth
            if held >= 0 and edge[1] >= 0:
                if held >= len(taken):
                    return None
                begin = max(begin, taken[held])
            wire = self.wires.get(edge, ())
            known.append(begin + (wire[at] if at < len(wire) else 0.0))
        return known[number]

    def step(self, device: int) -> bool:
        """Do a device's next job, if all that it waits for is known."""
        done = self.played[device]
        if len(done) == len(self.devices[device]):
            return False
        job = self.devices[device][len(done)]
        begin = done[-1].free_s if done else 0.0
        if job.source is not None:
            arrived = self.sent_s(job.source, len(self.taken.get(job.source, [])))
            if arrived is None:
                return False
            begin = max(begin, arrived)
        end = begin + job.seconds(self.counted)
        free = end + _sum(job.after, self.counted)
        if job.target is not None and job.stage >= 0:
            before = len(self.made.get(job.target, [])) - self.depth
            if before >= 0:
                room = self.sent_s(job.target, before)
                if room is None:
                    return False
                end = max(end, room)
        done.append(Played(job, begin, end, max(end, free)))
        if job.source is not None:
            self.taken.setdefault(job.source, []).append(end)
        if job.target is not None:
            self.made.setdefault(job.target, []).append(end)
        return True


def replay(
    devices: Sequence[Sequence[Job]], counted: frozenset[str], wires: Mapping[Edge, Sequence[float]], *, depth: int
) -> tuple[list[list[Played]], float]:
    """Play every device's jobs with the parts that are counted; gives when each was done, and the seconds in all.

    `wires[edge][k]` is how long message `k` is under way; none where an edge is missing.

    Example:
        _, seconds = replay(devices, frozenset({"compute"}), {}, depth=2)

    Raises `DataError` where the jobs wait for each other, as those of no real run do.
    """
    player = _Player(devices, counted, wires, depth, [[] for _ in devices], {}, {}, {})
    while any(player.step(device) for device in range(len(devices))):
        pass
    if any(len(done) < len(jobs) for done, jobs in zip(player.played, devices, strict=True)):
        raise DataError("the trace is of no whole run: some messages were never sent; run it again with --trace")
    ends = [done[-1].end_s for done in player.played if done]
    # results go back to the feeding process
    ends += [player.sent_s(edge, len(made) - 1) or 0.0 for edge, made in player.made.items() if edge[1] < 0]
    return player.played, max(ends, default=0.0)
