"""Event-driven simulator: begin and end of each job, and waiting times of devices.

    line 0   |F0|F1|  |B0|..            a line does its jobs in order; each waits
              \\                         for its message to arrive, and its result
    line 1      |F0|F1|B0|              for a free buffer towards the receiver

`simulate` runs schedules; `play` runs any lines of jobs with channels between them, for predicted streams and for
recorded runs that a report replays.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import PlanError
from penstock.plan.schedule.schedules import BACKWARD_PARTS, Action, Schedule, placement
from penstock.wire import NUM_BUFFERS

# kinds of messages across a cut: activations forwards, gradients back
Crossing = Literal["activations", "gradients"]
Duration = Callable[[Action, int], float]
Transfer = Callable[[int, int, Crossing], float]
# a cut in one direction: (sending stage, receiving stage)
Edge = tuple[int, int]
_NO_LIMIT = sys.maxsize


@dataclass(slots=True, kw_only=True, eq=False)
class Channel:
    """Messages from one line to another, numbered in order, that use a link one after the other.

    Message `k` occupies the link for `wire_s[k % len(wire_s)]` seconds; `latency_s` does not occupy it. The message is
    written once message `k - at_sender` has left the link and message `k - in_all` has been taken, and enters the link
    once the receiver has passed on its result of message `k - at_receiver`.
    """

    wire_s: Sequence[float] = (0.0,)
    latency_s: float = 0.0
    at_sender: int = _NO_LIMIT
    at_receiver: int = _NO_LIMIT
    in_all: int = _NO_LIMIT
    made: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)

    def sent_s(self, number: int) -> float | None:
        """Return the time at which a message has left the link; None while unknown."""
        sent, made, passed = self.sent, self.made, self.passed
        while len(sent) <= number:
            at = len(sent)
            held = at - self.at_receiver
            if at >= len(made) or held >= len(passed):
                return None
            begin = made[at]
            if sent and sent[-1] > begin:
                begin = sent[-1]
            if held >= 0 and passed[held] > begin:
                begin = passed[held]
            sent.append(begin + self.wire_s[at % len(self.wire_s)])
        return sent[number]

    def room_s(self) -> float | None:
        """Return the time at which the next message can be written; None while unknown."""
        held, before = len(self.made) - self.at_sender, len(self.made) - self.in_all
        if before >= len(self.taken):
            return None
        room = self.taken[before] if before >= 0 else 0.0
        if held < 0:
            return room
        left = self.sent[held] if held < len(self.sent) else self.sent_s(held)
        return None if left is None else max(left, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of a line: its seconds, the channel of its input message, and the channel of its result.

    It takes message `message`, by default the next message. `after_s` are further seconds before the device's next job,
    for which no message waits; they also pass while the device waits for a buffer.
    """

    seconds: float
    source: Channel | None = None
    target: Channel | None = None
    after_s: float = 0.0
    message: int | None = None


class Line:
    """Jobs of a device in order, with the times at which each begins, has computed, and has written its result."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.begins: list[float] = []
        self.computed: list[float] = []
        self.ends: list[float] = []
        self._free = 0.0

    @property
    def finished(self) -> bool:
        """True if all jobs are done."""
        return len(self.ends) == len(self.jobs)

    def advance(self) -> bool:
        """Advance until a job's dependency is unknown; return True on any progress."""
        jobs, begins, computed, ends = self.jobs, self.begins, self.computed, self.ends
        before = len(begins) + len(ends)
        while (at := len(ends)) < len(jobs):
            job = jobs[at]
            source, target = job.source, job.target
            if len(begins) == at:
                begin = self._free
                if source is not None:
                    number = len(source.taken) if job.message is None else job.message
                    arrived = source.sent[number] if number < len(source.sent) else source.sent_s(number)
                    if arrived is None:
                        break
                    arrived += source.latency_s
                    begin = arrived if arrived > begin else begin
                    source.taken.append(begin)
                begins.append(begin)
                computed.append(begin + job.seconds)
            done = end = computed[at]
            if target is not None:
                room = target.room_s()
                if room is None:
                    break
                end = room if room > end else end
            self._free = max(end, done + job.after_s)
            ends.append(end)
            if source is not None:
                source.passed.append(end)
            if target is not None:
                target.made.append(end)
        return len(begins) + len(ends) > before


def play(lines: Sequence[Line]) -> bool:
    """Run lines until all are done or deadlocked; return True if all are done.

    >>> channel = Channel(wire_s=(0.5,))
    >>> lines = [Line([Job(seconds=1.0, target=channel)] * 2), Line([Job(seconds=2.0, source=channel)] * 2)]
    >>> play(lines), lines[1].ends
    (True, [3.5, 5.5])
    """
    while max(map(Line.advance, lines), default=False):
        pass
    return all(line.finished for line in lines)


@dataclass(frozen=True, slots=True)
class SimulatedAction:
    """An action on a device: begin and end of its computation in seconds."""

    device: int
    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Result of simulating a schedule: the spans of each device, and peaks of microbatches in flight."""

    spans: tuple[tuple[SimulatedAction, ...], ...]
    makespan_s: float
    peak_in_flight: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the devices' total time without computation."""
        busy = sum(span.end_s - span.begin_s for spans in self.spans for span in spans)
        whole = self.makespan_s * len(self.spans)
        return 1 - busy / whole if whole else 0.0


def uniform(forward_s: float = 1.0, backward_s: float = 2.0) -> Duration:
    """Return durations for equal stages; halves of a split backward take half each, synchronization and update 0."""
    seconds = {"F": forward_s, "S": 0.0, "U": 0.0} | {kind: part * backward_s for kind, part in BACKWARD_PARTS.items()}
    return lambda action, _device: seconds[action.kind]


def simulate(
    schedule: Schedule,
    duration: Duration | None = None,
    transfer: Transfer = lambda _source, _to, _kind: 0.0,
    *,
    num_buffers: int | None = NUM_BUFFERS,
) -> Simulation:
    """Simulate a schedule.

    `duration` returns an action's seconds on a device, `transfer` a message's seconds from one device to another.
    `num_buffers` is the number of messages that a cut holds in each direction before the sender waits, None for no
    limit; by default two at the sender and two at the receiver, as in the engine.

    Example:
        simulate(one_f_one_b(4, 8)).bubble_fraction

    Raises `PlanError` on a deadlock, naming the devices and their actions.
    """
    lines = _lines(schedule, duration or uniform(), transfer, num_buffers)
    if not play(lines):
        raise PlanError(f"the schedule deadlocks: {_standstill(schedule, lines)}; change the order of these actions")
    spans = tuple(
        tuple(SimulatedAction(device, *times) for times in zip(actions, line.begins, line.computed, strict=True))
        for device, (actions, line) in enumerate(zip(schedule, lines, strict=True))
    )
    return Simulation(
        spans=spans,
        makespan_s=max((device[-1].end_s for device in spans if device), default=0.0),
        peak_in_flight=tuple(map(_peak, schedule)),
    )


def _lines(schedule: Schedule, duration: Duration, transfer: Transfer, num_buffers: int | None) -> list[Line]:
    """Convert each device's actions to jobs, with a channel for each cut and direction."""
    devices = placement(schedule)
    channels: dict[Edge, Channel] = {}
    numbers: dict[tuple[Edge, int], int] = {}
    num_made: dict[Edge, int] = {}
    for action in (action for actions in schedule for action in actions):
        edge = _edges(action, devices)[1]
        if edge is not None:
            numbers[edge, action.microbatch] = num_made.setdefault(edge, 0)
            num_made[edge] += 1
            sender, receiver = devices[edge[0]], devices[edge[1]]
            if edge not in channels and sender == receiver:
                channels[edge] = Channel()
            elif edge not in channels:
                kind: Crossing = "activations" if action.kind == "F" else "gradients"
                wire_s = transfer(sender, receiver, kind)
                channels[edge] = Channel(wire_s=(wire_s,), in_all=_NO_LIMIT if num_buffers is None else num_buffers)

    def job(action: Action, device: int) -> Job:
        source, target = _edges(action, devices)
        return Job(
            seconds=duration(action, device),
            source=source and channels.setdefault(source, Channel()),
            # a message that is never sent never arrives
            message=source and numbers.get((source, action.microbatch), _NO_LIMIT),
            target=target and channels[target],
        )

    return [Line([job(action, device) for action in actions]) for device, actions in enumerate(schedule)]


def _edges(action: Action, devices: Mapping[int, int]) -> tuple[Edge | None, Edge | None]:
    """Return the cuts that an action's input message and its result cross, if any."""
    stage = action.stage
    before = (stage - 1, stage) if stage > 0 else None
    after = (stage, stage + 1) if stage + 1 in devices else None
    if action.kind == "F":
        return before, after
    return (after and after[::-1], before and before[::-1]) if action.kind in {"B", "I"} else (None, None)


def _standstill(schedule: Schedule, lines: Sequence[Line]) -> str:
    """Describe the current action of every unfinished device."""
    parts = []
    for device, (actions, line) in enumerate(zip(schedule, lines, strict=True)):
        if len(line.begins) > len(line.ends):
            result = actions[len(line.ends)]
            parts.append(f"device {device} cannot pass on the result of {result}, its buffers are full")
        elif not line.finished:
            parts.append(f"device {device} is at {actions[len(line.ends)]}")
    return ", ".join(parts)


def _peak(actions: tuple[Action, ...]) -> int:
    """Return the peak number of microbatches whose activations a device holds, counted per stage."""
    held = most = 0
    for action in actions:
        held += action.kind == "F"
        most = max(most, held)
        held -= action.kind in {"B", "W"}
    return most
