"""Output and exit status of processes on other hosts, for display."""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.text import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """A line that a process wrote."""

    host: str
    local_rank: int
    stream: Literal["stdout", "stderr"]
    text: str


Output = Callable[[OutputLine], None]
# which event ends all processes: True: the first failure of any process; "first": the exit of the first host's process;
# "first-failed": its failure
EndTogether = bool | Literal["first", "first-failed"]


def print_line(line: OutputLine) -> None:
    """Print a line with the host's name in front, to the same stream (stdout or stderr)."""
    file = sys.stdout if line.stream == "stdout" else sys.stderr
    # one write, so that lines of two hosts do not mix
    text = "\t".join(plain(part) for part in line.text.split("\t"))
    file.write(f"{plain(line.host)} | {text}\n")
    file.flush()


def exit_name(code: int) -> str:
    """Describe how a process ended.

    >>> exit_name(3), exit_name(-15)
    ('status 3', 'SIGTERM')
    """
    if code >= 0:
        return f"status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
