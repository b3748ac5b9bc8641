"""Names of devices, hosts and files: what they may be, since they become folders and are shown to people."""

import re

from penstock.errors import PenstockError

# no separators of paths, no space, no leading dot or dash: neither another folder nor an option of a command
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@-]{0,127}", re.ASCII)
NAME_RULE = "is 1 to 128 letters, digits or . _ : + @ - and starts with a letter, a digit or _"


def is_name(name: object) -> bool:
    """Return whether this can be the name of a device, a host or a file.

    >>> is_name("board:1"), is_name("pi-4.local"), is_name("../../x"), is_name("two words")
    (True, True, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(what: str, name: object, error: type[PenstockError]) -> None:
    """Raise `error` unless this can be the name of a device, a host or a file."""
    if not is_name(name):
        raise error(f"{what} {NAME_RULE}, not {repr(name)[:80]}; rename it")


def as_name(text: str) -> str:
    """Make a name of what people call a process: what a name may not have becomes a dash.

    >>> as_name("worker 1"), as_name("stage 0 on board")
    ('worker-1', 'stage-0-on-board')
    """
    name = re.sub(r"[^A-Za-z0-9._:+@-]+", "-", text).lstrip(".:+@-")[:128]
    return name or "device"
