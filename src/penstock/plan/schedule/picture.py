"""Text formats of schedules: parsing, clock cycles, drawing, and the bubble's formula."""

import re
from itertools import groupby
from pathlib import Path
from typing import cast

import msgspec

from penstock.errors import UsageError
from penstock.plan.schedule.actions import KINDS, STAGE_KINDS, Action, Kind, Schedule
from penstock.plan.schedule.schedules import SCHEDULES
from penstock.plan.schedule.simulate import Duration, simulate, uniform

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
