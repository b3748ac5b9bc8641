"""Play a schedule event by event: when each action begins and ends, and how long devices wait.

device 0   |F0|F1|  |B0|..            a device does its actions in order; each waits
              \\                       for its inputs to arrive, and its result
device 1      |F0|F1|B0|              for a free buffer towards the receiver
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import PlanError
from penstock.plan.schedule.actions import NUM_BUFFERS, Action, Schedule, placement

# what crosses a cut: activations forwards, gradients back
Crossing = Literal["activations", "gradients"]
Duration = Callable[[Action, int], float]
Transfer = Callable[[int, int, Crossing], float]
# one cut in one direction: the sending and the receiving stage
_Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """One action on a device: when it began to compute and when it had computed; seconds."""

    device: int
    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule would do: spans in the order of each device, and how full the devices are."""

    spans: tuple[tuple[Span, ...], ...]
    makespan_s: float
    peak_in_flight: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """The part of all devices' time in which they do not compute."""
        busy = sum(span.end_s - span.begin_s for spans in self.spans for span in spans)
        whole = self.makespan_s * len(self.spans)
        return 1 - busy / whole if whole else 0.0


def uniform(forward_s: float = 1.0, backward_s: float = 2.0) -> Duration:
    """Every stage alike; each half of a backward takes half of it, synchronization and update nothing."""
    seconds = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2, "S": 0.0, "U": 0.0}
    return lambda action, _device: seconds[action.kind]


def simulate(
    schedule: Schedule,
    duration: Duration | None = None,
    transfer: Transfer = lambda _source, _to, _kind: 0.0,
    *,
    num_buffers: int | None = NUM_BUFFERS,
) -> Simulation:
    """Play a schedule.

    `duration` gives an action's seconds on a device, `transfer` those that a message takes from one
    device to another. `num_buffers` is how many messages a cut holds in each direction between two
    devices before the sender waits, None for any number; two at the sender and two at the receiver
    where not given, as the engine has.

    Example:
        simulate(one_f_one_b(4, 8)).bubble_fraction

    Raises `PlanError` when the devices end up waiting for each other; the message says which for what.
    """
    player = _Player(schedule, duration or uniform(), transfer, num_buffers)
    while player.advance():
        pass
    if not player.finished:
        raise PlanError(f"the schedule waits for itself: {player.explain()}; change the order of these actions")
    spans = tuple(map(tuple, player.spans))
    return Simulation(
        spans=spans,
        makespan_s=max((device[-1].end_s for device in spans if device), default=0.0),
        peak_in_flight=tuple(map(_peak, schedule)),
    )


def _peak(actions: tuple[Action, ...]) -> int:
    """Count the most microbatches whose activations a device holds at a time, one for each stage that has any."""
    held = most = 0
    for action in actions:
        held += action.kind == "F"
        most = max(most, held)
        held -= action.kind in {"B", "W"}
    return most


@dataclass
class _Player:
    schedule: Schedule
    duration: Duration
    transfer: Transfer
    num_buffers: int | None
    spans: list[list[Span]] = field(default_factory=list)
    arrivals: dict[tuple[_Edge, int], float] = field(default_factory=dict)
    sent: Mapping[_Edge, list[float]] = field(default_factory=lambda: defaultdict(list))
    taken: Mapping[_Edge, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.devices = placement(self.schedule)
        self.spans = [[] for _ in self.schedule]
        self._free = [0.0] * len(self.schedule)
        self._unsent: list[_Edge | None] = [None] * len(self.schedule)
        self.trains = any(action.kind in {"B", "I"} for actions in self.schedule for action in actions)

    @property
    def finished(self) -> bool:
        return all(
            len(done) == len(actions) for done, actions in zip(self.spans, self.schedule, strict=True)
        ) and not any(self._unsent)

    def advance(self) -> bool:
        """Let every device go on as far as it can; tells whether any did."""
        moved = False
        for device in range(len(self.schedule)):
            while self._step(device):
                moved = True
        return moved

    def _step(self, device: int) -> bool:
        if self._unsent[device] is not None:
            return self._send(device)
        actions, done = self.schedule[device], self.spans[device]
        if len(done) == len(actions):
            return False
        action = actions[len(done)]
        begin = self._begin(action, device)
        if begin is None:
            return False
        end = begin + self.duration(action, device)
        done.append(Span(device, action, begin, end))
        self._free[device] = end
        edge = self.source(action)
        if edge is not None:
            self.taken[edge].append(begin)
        self._unsent[device] = self._target(action)
        return True

    def _begin(self, action: Action, device: int) -> float | None:
        """When an action's input is there and the device is free; None while that is not known."""
        edge = self.source(action)
        if edge is None:
            return self._free[device]
        arrival = self.arrivals.get((edge, action.microbatch))
        return None if arrival is None else max(arrival, self._free[device])

    def _send(self, device: int) -> bool:
        """Pass the result on, once a message before it has been taken."""
        edge, action = self._unsent[device], self.spans[device][-1].action
        if edge is None:
            return False
        receiver = self.devices[edge[1]]
        if receiver != device and self.num_buffers is not None:
            before = len(self.sent[edge]) - self.num_buffers
            if before >= len(self.taken[edge]):
                return False
            if before >= 0:
                self._free[device] = max(self._free[device], self.taken[edge][before])
        kind: Crossing = "activations" if action.kind == "F" else "gradients"
        delay = 0.0 if receiver == device else self.transfer(device, receiver, kind)
        # a link carries one message after the other
        begin = max(self._free[device], *self.sent[edge][-1:]) if self.sent[edge] else self._free[device]
        self.sent[edge].append(begin + delay)
        self.arrivals[edge, action.microbatch] = begin + delay
        self._unsent[device] = None
        return True

    def source(self, action: Action) -> _Edge | None:
        """Return the cut that an action takes a message from."""
        if action.kind == "F" and action.stage > 0:
            return action.stage - 1, action.stage
        if action.kind in {"B", "I"} and action.stage + 1 in self.devices:
            return action.stage + 1, action.stage
        return None

    def _target(self, action: Action) -> _Edge | None:
        if action.kind == "F" and action.stage + 1 in self.devices:
            return action.stage, action.stage + 1
        if action.kind in {"B", "I"} and action.stage > 0:
            return action.stage, action.stage - 1
        return None

    def explain(self) -> str:
        """Say where every unfinished device stands."""
        parts = []
        for device, (actions, done) in enumerate(zip(self.schedule, self.spans, strict=True)):
            if self._unsent[device] is not None:
                parts.append(f"device {device} cannot pass on the result of {done[-1].action}, its buffers are full")
            elif len(done) < len(actions):
                parts.append(f"device {device} is at {actions[len(done)]}")
        return ", ".join(parts)
