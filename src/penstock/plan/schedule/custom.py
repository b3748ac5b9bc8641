"""Custom schedules: parsing of their text, and validation; drawing by clock cycles, and the bubble's formula."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import cast

import msgspec

from penstock.errors import PlanError, UsageError
from penstock.plan.schedule.schedules import KINDS, SCHEDULES, STAGE_KINDS, Action, Kind, Schedule, placement
from penstock.plan.schedule.simulate import Duration, Simulation, simulate, uniform
from penstock.wire import NUM_BUFFERS

# kinds in written schedules; checkpointing adds recomputed forwards
_WRITTEN = [kind for kind in KINDS if kind != "R"]
_IDLE = "."
_DRAWN = re.compile(r"device \d+  (.*)")
_ACTION = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?")


def read_schedule(text: str) -> Schedule:
    """Parse a schedule with one line per device; `#` begins a comment, and a device's only stage may be omitted.

    The output of `penstock schedule`, printed or from `--json`, is accepted too.

    Example:
        read_schedule('''
            F0 F1 B0 B1        # device 0: stage 0
            F0 B0 F1 B1        # device 1: stage 1
        ''')

    Raises `UsageError` for a word that is not an action. Use `check_schedule` to validate the whole schedule.
    """
    drawn = [match[1] for match in map(_DRAWN.fullmatch, text.splitlines()) if match]
    if text.lstrip().startswith("{"):
        lines = [line.split() for line in _read_devices(text)]
    elif drawn:  # one word per tick: an action may take several, an idle tick is a dot
        lines = [[word for word, _ in groupby(line.split()) if word != _IDLE] for line in drawn]
    else:
        lines = [line.partition("#")[0].split() for line in text.splitlines()]
    devices = [words for words in lines if words]
    if not devices:
        raise UsageError("the schedule is empty; write one line of actions per device, as in 'F0 F1 B0 B1'")
    return tuple(tuple(_read(word, device) for word in words) for device, words in enumerate(devices))


def _read_devices(text: str) -> list[str]:
    """Return the lines of a schedule written by `penstock schedule --json`."""
    try:
        return msgspec.json.decode(text, type=_Written).devices
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"a schedule in JSON must be written by penstock schedule --json ({error}); write it again, or write "
            "a text with a line of actions for each device"
        ) from None


class _Written(msgspec.Struct):
    """The part of a schedule's JSON that is read."""

    devices: list[str]


def find_schedule(given: str) -> str:
    """Return a schedule's name or its text, read from a file if given a path.

    Raises `UsageError` for other strings.

    >>> find_schedule("1f1b"), find_schedule("F0 B0")
    ('1f1b', 'F0 B0')
    """
    if given in SCHEDULES or any(character.isspace() for character in given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise UsageError(
            f"{given!r} is neither a schedule nor a readable file; use one of {', '.join(SCHEDULES)}, or a file with "
            "a line of actions for each device, as in F0 F1 B0 B1"
        ) from None


def _read(word: str, device: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None or match[1] not in _WRITTEN or bool(match[2]) == (match[1] in STAGE_KINDS):
        raise UsageError(
            f"{repr(word)[:80]} on line {device + 1} is not an action; write a kind ({', '.join(_WRITTEN)}), "
            "a microbatch and a stage, as in F3.1, and S.1 or U.1 for a whole stage"
        )
    return Action(cast(Kind, match[1]), int(match[2] or 0), int(match[3] or device))


def clock_cycles(schedule: Schedule, duration: Duration | None = None) -> list[list[Action | None]]:
    """Return each device's action for every tick; a forward takes one tick, a backward two, a half backward one.

    >>> from penstock.plan.schedule.schedules import gpipe
    >>> [[str(action) if action else "" for action in tick] for tick in clock_cycles(gpipe(2, 2))][:3]
    [['F0.0', ''], ['F1.0', 'F0.1'], ['', 'F1.1']]
    """
    result = simulate(schedule, duration or uniform(), num_buffers=None)
    ticks: list[list[Action | None]] = [[None] * len(schedule) for _ in range(round(result.makespan_s))]
    for spans in result.spans:
        for span in spans:
            for tick in range(round(span.begin_s), round(span.end_s)):
                ticks[tick][span.device] = span.action
    return ticks


def draw(schedule: Schedule) -> str:
    """Draw each device's actions over time, one line per device; `B0` over two columns is a backward.

    >>> from penstock.plan.schedule.schedules import gpipe
    >>> print(draw(gpipe(2, 1)))
    device 0  F0 .  .  .  B0 B0
    device 1  .  F0 B0 B0 .  .
    """
    ticks = clock_cycles(schedule)
    several = any(len({action.stage for action in actions}) > 1 for actions in schedule)
    lines = {f"device {d}": [_cell(tick[d], several) for tick in ticks] for d in range(len(schedule))}
    width = max((len(cell) for cells in lines.values() for cell in cells), default=0)
    rows = [(name, " ".join(f"{cell:{width}}" for cell in cells)) for name, cells in lines.items()]
    return "\n".join(f"{name:{max(map(len, lines))}}  {row}".rstrip() for name, row in rows)


def _cell(action: Action | None, several: bool) -> str:
    if action is None:
        return _IDLE
    return str(action) if several else f"{action.kind}{action.microbatch}"


def bubble_formula(name: str, num_stages: int, num_microbatches: int, num_devices: int) -> tuple[str, float]:
    """Return a schedule's bubble by its paper's formula, for equal stages with forward 1 and backward 2.

    With p devices, m microbatches and v stages per device. Raises `UsageError` for an unknown name.
    """
    if name not in SCHEDULES:
        raise UsageError(f"no formula is known for the bubble of the schedule {name!r}")
    text, formula = SCHEDULES[name].bubble
    return text, formula(num_devices, num_microbatches, num_stages / num_devices)


_NEEDS: Mapping[str, Kind] = {"B": "F", "I": "F", "W": "I"}


def check_schedule(schedule: Schedule, *, num_buffers: int | None = NUM_BUFFERS) -> Simulation:
    """Check that a schedule can run, and return its simulation with equal times for all actions.

    - each stage is on one device, and none is missing between the first and the last;
    - each stage runs each microbatch forward once, and backward once or not at all, split or whole;
    - a forward is before its backward, and the inputs' half before the weights' half;
    - neighbours send and receive in the same order, since channels are ordered;
    - devices never wait for each other in a circle with `num_buffers` buffers.

    Example:
        check_schedule(read_schedule(text)).peak_in_flight

    Raises `PlanError` naming the action that violates a rule.
    """
    _check_places(schedule)
    for device, actions in enumerate(schedule):
        _check_order(device, actions)
    _check_complete(schedule)
    _check_channels(schedule)
    return simulate(schedule, num_buffers=num_buffers)


def check_given(schedule: Schedule, *, num_buffers: int | None = NUM_BUFFERS) -> Simulation:
    """Check a custom schedule as `check_schedule` does, but raise `UsageError` instead of `PlanError`."""
    try:
        return check_schedule(schedule, num_buffers=num_buffers)
    except PlanError as error:
        raise UsageError(str(error)) from error


def _check_places(schedule: Schedule) -> None:
    devices = placement(schedule)
    for device, actions in enumerate(schedule):
        for action in actions:
            if devices[action.stage] != device:
                raise PlanError(
                    f"stage {action.stage} is on device {device} and on device {devices[action.stage]}; "
                    "a stage must be on one device"
                )
    missing = set(range(max(devices, default=-1) + 1)) - set(devices)
    if missing:
        raise PlanError(
            f"stage {min(missing)} is assigned to no device; add actions for every stage from 0 to {max(devices)}"
        )


def _check_order(device: int, actions: Sequence[Action]) -> None:
    done: set[Action] = set()
    for action in actions:
        needs = _NEEDS.get(action.kind)
        if action in done:
            raise PlanError(f"device {device} does {action} twice; remove one")
        if needs and Action(needs, action.microbatch, action.stage) not in done:
            raise PlanError(f"device {device} does {action} before {needs}{str(action)[1:]}; change their order")
        if action.kind in STAGE_KINDS and any(
            a.kind not in STAGE_KINDS and a.stage == action.stage for a in actions[len(done) :]
        ):
            raise PlanError(f"device {device} does {action} before the stage's last backward; move it to the end")
        done.add(action)


def _check_complete(schedule: Schedule) -> None:
    forward: dict[int, set[int]] = defaultdict(set)
    backward: Counter[tuple[int, int, str]] = Counter()
    for actions in schedule:
        for action in actions:
            if action.kind == "F":
                forward[action.stage].add(action.microbatch)
            elif action.kind not in STAGE_KINDS:
                backward[action.stage, action.microbatch, action.kind] += 1
    microbatches = set().union(*forward.values())
    if microbatches != set(range(len(microbatches))):
        raise PlanError(f"microbatches must be numbered from 0 without gaps; got {sorted(microbatches)}")
    for stage in placement(schedule):
        for microbatch in range(len(microbatches)):
            whole, inputs, weights = (backward[stage, microbatch, kind] for kind in "BIW")
            wanted = [(0, 0, 0)] if not backward else [(1, 0, 0), (0, 1, 1)]
            if microbatch not in forward[stage]:
                raise PlanError(f"F{microbatch}.{stage} is missing; every stage takes every microbatch")
            if (whole, inputs, weights) not in wanted:
                raise PlanError(
                    f"microbatch {microbatch} must have one B, or one I and one W, on stage {stage}; got {whole} B, "
                    f"{inputs} I and {weights} W"
                )


def _check_channels(schedule: Schedule) -> None:
    """Check that receivers take messages in the order in which they are sent."""
    made: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for actions in schedule:
        for action in actions:
            if action.kind in {"F", "B", "I"}:
                made[action.stage, action.kind == "F"].append(action.microbatch)
    for earlier, later in pairwise(sorted(placement(schedule))):
        for forward, sender, receiver in ((True, earlier, later), (False, later, earlier)):
            sent, taken = made[sender, forward], made[receiver, forward]
            for a, b in zip(sent, taken, strict=True):
                if a != b:
                    what = "activations" if forward else "gradients"
                    raise PlanError(
                        f"stage {sender} sends the {what} of microbatch {a}, but stage {receiver} expects those of "
                        f"{b}; give both the same order"
                    )
