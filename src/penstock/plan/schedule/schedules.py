"""Schedules as data: the actions of each device, in order; and the built-in training schedules, listed in `SCHEDULES`.

An action is written `F3.1`: forward of microbatch 3 on stage 1. For a device with one stage, the stage may be omitted.
The executor and all other readers of schedules use the same list.

    F  forward
    B  backward: gradients of the inputs and of the weights
    I  backward for the inputs only; W  later, for the weights: the two halves of a B
    R  the forward again, for a stage that kept only its inputs
    S  gradients of a stage, summed over replicas and over stages that share a weight
    U  the optimizer's update of a stage's weights

Built-in schedules are pure functions from counts to actions. With more stages than devices, devices in `gpipe`,
`one_f_one_b` and `zero_bubble` hold neighbouring stages and run them like a single stage; in `interleaved_1f1b` they
hold stages that are far apart.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice
from typing import Literal, TypeAlias, TypeVar, get_args

from penstock.errors import UsageError
from penstock.wire import NUM_BUFFERS

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


# (microbatch, stage)
_Work = tuple[int, int]
_T = TypeVar("_T")


def interleaved_1f1b(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Return interleaved 1F1B, with stages assigned round-robin to the devices (Narayanan et al. 2021, Megatron-LM).

        device 0 of 2, stages 0 and 2:  F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 ...

    Groups of as many microbatches as there are devices run on a device's first stage, then on its next. If microbatches
    or stages are not divisible by the devices, the paper defines no order: devices then take the first possible action
    in the paper's order, backwards before forwards.
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
    """Yield `ahead` forwards, then forwards and backwards alternately, then the remaining backwards.

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
    """Build an order by simulating ticks: a backward if its gradient has arrived, else a forward if memory suffices."""
    done: set[tuple[Kind, int, int]] = set()
    to_forward, to_backward = list(map(list, forwards)), list(map(list, backwards))
    devices: list[list[Action]] = [[] for _ in most]
    held = [0] * len(most)
    limits = list(most)
    passed: Counter[tuple[Kind, int]] = Counter()

    def ready(kind: Kind, microbatch: int, stage: int) -> bool:
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        # a device that cannot send its result is blocked: the order depends on the buffers of cuts
        full = 0 <= after < num_stages and passed[kind, stage] - passed[kind, after] >= NUM_BUFFERS
        come = not 0 <= before < num_stages or (kind, microbatch, before) in done
        return not full and come and (kind == "F" or ("F", microbatch, stage) in done)

    while any(to_backward):
        tick: list[tuple[int, Action]] = []
        for device, limit in enumerate(limits):
            back = next((w for w in to_backward[device] if ready("B", *w)), None)
            ahead = next((w for w in to_forward[device] if ready("F", *w)), None)
            if back is not None:
                to_backward[device].remove(back)
                tick.append((device, Action("B", *back)))
            elif ahead is not None and held[device] < limit:
                to_forward[device].remove(ahead)
                tick.append((device, Action("F", *ahead)))
        if not tick:  # the paper's memory limit is too small for these counts
            limits = [limit + 1 for limit in limits]
        for device, action in tick:
            done.add((action.kind, action.microbatch, action.stage))
            passed[action.kind, action.stage] += 1
            devices[device].append(action)
            held[device] += 1 if action.kind == "F" else -1
    return tuple(map(tuple, devices))


MakeSchedule = Callable[[int, int, int], Schedule]


def gpipe(num_stages: int, num_microbatches: int, num_devices: int | None = None) -> Schedule:
    """Return all forwards, then all backwards (Huang et al. 2019, GPipe).

        device 0 of 2:  F0 F1 F2 B0 B1 B2       holds every microbatch

    Backwards are in the order of the forwards, so that all schedules add up gradients in the same order.
    """
    microbatches = range(num_microbatches)

    def order(_device: int, _devices: int) -> Iterator[tuple[Kind, int]]:
        yield from (("F", m) for m in microbatches)
        yield from (("B", m) for m in microbatches)

    return _in_blocks(num_stages, num_microbatches, num_devices, order)


def one_f_one_b(num_stages: int, num_microbatches: int, num_devices: int | None = None) -> Schedule:
    """Return alternating forwards and backwards (Narayanan et al., PipeDream, 2019; flushed as in Megatron-LM).

    device 0 of 4:  F0 F1 F2 F3 B0 F4 B1 ...   holds at most as many microbatches as there are devices
    device 3 of 4:  F0 B0 F1 B1 F2 B2 ...      holds one microbatch
    """

    def order(device: int, num_devices: int) -> Iterator[tuple[Kind, int]]:
        return alternate(range(num_microbatches), range(num_microbatches), num_devices - device - 1)

    return _in_blocks(num_stages, num_microbatches, num_devices, order)


def zero_bubble(num_stages: int, num_microbatches: int, num_devices: int | None = None) -> Schedule:
    """Return 1F1B with split backwards; the weights' half runs when a device would wait (Qi et al. 2023, ZB-H1).

        device 0 of 3:  F0 F1 F2 I0 W0 F3 I1 W1 ...
        device 2 of 3:  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...     W is two microbatches late

    Gradients reach the previous device earlier, and no device needs more memory than the first device of 1F1B.
    """

    def order(device: int, num_devices: int) -> Iterator[tuple[Kind, int]]:
        every = range(num_microbatches)
        for kind, m in alternate(every, every, num_devices - device - 1):
            yield ("I" if kind == "B" else kind), m
            if kind == "B" and m >= device:
                yield "W", m - device
        yield from (("W", m) for m in range(max(0, num_microbatches - device), num_microbatches))

    return _in_blocks(num_stages, num_microbatches, num_devices, order)


def with_updates(schedule: Schedule, *, update: bool = True) -> Schedule:
    """Add the synchronization of each stage after its last backward, and the optimizer's step at the end.

    >>> from penstock.plan.schedule.schedules import text
    >>> text(with_updates(gpipe(1, 2))[0])
    'F0.0 F1.0 B0.0 B1.0 S.0 U.0'
    """
    return tuple(tuple(_with_updates(actions, update)) for actions in schedule)


def _with_updates(actions: Sequence[Action], update: bool) -> Iterator[Action]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in {"B", "W"}}
    given = {action.stage for action in actions if action.kind == "S"}
    for index, action in enumerate(actions):
        yield action
        if last.get(action.stage) == index and action.stage not in given:
            yield Action("S", 0, action.stage)
    if update:
        yield from (Action("U", 0, stage) for stage in sorted(last))


def with_recompute(schedule: Schedule) -> Schedule:
    """Add a recomputed forward before each backward, which runs while the gradients are in transit.

    >>> from penstock.plan.schedule.schedules import text
    >>> text(with_recompute(gpipe(1, 2))[0])
    'F0.0 F1.0 R0.0 B0.0 R1.0 B1.0'
    """
    return tuple(
        tuple(
            each
            for action in actions
            for each in ((replace(action, kind="R"), action) if action.kind in {"B", "I"} else (action,))
        )
        for actions in schedule
    )


def spread(schedule: Schedule, stages: Sequence[int]) -> Schedule:
    """Replace each device's single stage by several neighbouring stages, run like a single stage.

    >>> from penstock.plan.schedule.schedules import text
    >>> [text(actions) for actions in spread(gpipe(2, 1), [1, 2])]
    ['F0.0 B0.0', 'F0.1 F0.2 B0.2 B0.1']
    """
    firsts = [sum(stages[:device]) for device in range(len(stages))]
    return tuple(
        tuple(
            Action(action.kind, action.microbatch, stage)
            for action in actions
            for stage in (own if action.kind == "F" else reversed(own))
        )
        for actions, own in zip(schedule, map(range, firsts, accumulate(stages)), strict=True)
    )


def _in_blocks(
    num_stages: int,
    num_microbatches: int,
    num_devices: int | None,
    order: Callable[[int, int], Iterator[tuple[Kind, int]]],
) -> Schedule:
    """Assign neighbouring stages to each device, in the order of its single stage."""
    num_devices = check_counts(num_stages, num_microbatches, num_devices)
    each, more = divmod(num_stages, num_devices)
    devices = range(num_devices)
    one_each = tuple(tuple(Action(kind, m, device) for kind, m in order(device, num_devices)) for device in devices)
    return spread(one_each, [each + (device < more) for device in devices])


def check_counts(num_stages: int, num_microbatches: int, num_devices: int | None) -> int:
    """Return the number of devices, by default one per stage; raises `UsageError` for impossible counts."""
    num_devices = num_stages if num_devices is None else num_devices
    if min(num_stages, num_microbatches, num_devices) < 1:
        raise UsageError(
            f"a schedule needs at least one stage, microbatch and device; got {num_stages}, {num_microbatches} and "
            f"{num_devices}"
        )
    if num_devices > num_stages:
        raise UsageError(f"{num_devices} devices but {num_stages} stages: use at least as many stages as devices")
    return num_devices


def _interleaved(num_stages: int, num_microbatches: int, num_devices: int | None = None) -> Schedule:
    return interleaved_1f1b(num_stages, num_microbatches, check_counts(num_stages, num_microbatches, num_devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSchedule:
    """Properties of a schedule, used by planner, options, help texts, drawings and reports.

    - `make`: makes the schedule from the numbers of stages, microbatches and devices;
    - `in_flight`: microbatches that a stage keeps for their backward, from the stage's number (1 is the last stage),
      the number of stages and the number of microbatches;
    - `bubble`: the paper's formula for equal stages, forward 1 and backward 2, as text and as a function of p devices,
      m microbatches and v stages on each device;
    - `interleaves`: a device holds stages that are far apart in the model, not neighbours;
    - `counts_stages`: `in_flight` depends on the number of stages;
    - `advised`: a report may recommend it for the same stages on the same devices.
    """

    help: str
    make: MakeSchedule
    in_flight: Callable[[int, int, int], int]
    bubble: tuple[str, Callable[[int, int, float], float]]
    interleaves: bool = False
    counts_stages: bool = False
    advised: bool = False


SCHEDULES: Mapping[str, KnownSchedule] = {
    "gpipe": KnownSchedule(
        help="all forwards, then all backwards",
        make=gpipe,
        in_flight=lambda _from_end, _stages, microbatches: microbatches,
        bubble=("(p-1) / (m+p-1)", lambda p, m, _v: (p - 1) / (m + p - 1)),
    ),
    "1f1b": KnownSchedule(
        help="forwards and backwards alternately",
        make=one_f_one_b,
        advised=True,
        in_flight=lambda from_end, _stages, microbatches: min(from_end, microbatches),
        bubble=("(p-1) / (m+p-1)", lambda p, m, _v: (p - 1) / (m + p - 1)),
    ),
    "interleaved": KnownSchedule(
        help="1f1b with several stages on each device",
        make=_interleaved,
        in_flight=lambda from_end, _stages, microbatches: min(from_end, microbatches),
        bubble=("(p-1) / (v*m+p-1)", lambda p, m, v: (p - 1) / (v * m + p - 1)),
        interleaves=True,
    ),
    "zero-bubble": KnownSchedule(
        help="1f1b with split backwards",
        make=zero_bubble,
        in_flight=lambda _from_end, stages, microbatches: min(stages, microbatches),
        # (p-1)(F+I-W) of m(F+I+W) and that, with F = I = W
        bubble=("(p-1) / (3*m+p-1)", lambda p, m, _v: (p - 1) / (3 * m + p - 1)),
        counts_stages=True,
        advised=True,
    ),
}
# the default for training, and the one to recommend: no other schedule needs less memory
DEFAULT_SCHEDULE = "1f1b"


def interleaves(name: str) -> bool:
    """Return True for a built-in schedule whose devices hold stages that are far apart in the model."""
    return name in SCHEDULES and SCHEDULES[name].interleaves


def make_schedule(name: str, num_stages: int, num_microbatches: int, num_devices: int | None = None) -> Schedule:
    """Return the schedule with this name; raises `UsageError` if it is unknown.

    Example:
        make_schedule("1f1b", num_stages=4, num_microbatches=8)
    """
    if name not in SCHEDULES:
        raise UsageError(f"the schedule {name!r} is not known; use one of {', '.join(SCHEDULES)}, or write your own")
    return SCHEDULES[name].make(num_stages, num_microbatches, check_counts(num_stages, num_microbatches, num_devices))
