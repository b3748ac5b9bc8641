"""A user's own schedule, written as text."""

import re
from typing import cast

from penstock.errors import UsageError
from penstock.plan.schedule.actions import KINDS, STAGE_KINDS, Action, Kind, Schedule

# what people write: forwards are computed once more where a stage is told to, by checkpointing
_WRITTEN = [kind for kind in KINDS if kind != "R"]
_ACTION = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?")


def read_schedule(text: str) -> Schedule:
    """Read a schedule with one line per device; `#` begins a comment, and a lone stage may be left out.

    Example:
        read_schedule('''
            F0 F1 B0 B1        # device 0: stage 0
            F0 B0 F1 B1        # device 1: stage 1
        ''')

    Raises `UsageError` for a word that is no action. Whether the whole can be run, `check_schedule` says.
    """
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    devices = [words for words in lines if words]
    if not devices:
        raise UsageError("the schedule is empty; write one line of actions per device, as in 'F0 F1 B0 B1'")
    return tuple(tuple(_read(word, device) for word in words) for device, words in enumerate(devices))


def _read(word: str, device: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None or match[1] not in _WRITTEN or bool(match[2]) == (match[1] in STAGE_KINDS):
        raise UsageError(
            f"{word!r} on line {device + 1} is no action; write a kind ({', '.join(_WRITTEN)}), a microbatch and a "
            "stage, as in F3.1, and S.1 or U.1 for a whole stage"
        )
    return Action(cast(Kind, match[1]), int(match[2] or 0), int(match[3] or device))
