"""The seam to the programs that change the network: `ip` and `tc`."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.errors import RunError

_DEADLINE_S = 30.0


class Shell(Protocol):
    """Runs one program to its end and returns what it wrote."""

    def run(self, command: Sequence[str]) -> str:
        """Run a command; raises `RunError` when it fails."""
        ...


class SystemShell:
    """Runs programs of this machine, each with a deadline.

    >>> SystemShell().run(["echo", "hello"])
    'hello\\n'
    """

    def run(self, command: Sequence[str]) -> str:
        """Run a command; raises `RunError` with its last words when it fails or takes too long."""
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_DEADLINE_S,
                stdin=subprocess.DEVNULL,
                # a command that outlives its killed caller still holds the lock that it was run under
                close_fds=False,
            )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"a lab command ends within {_DEADLINE_S:g} s, but {' '.join(command)} did not; "
                "run penstock lab down and try again"
            ) from None
        except OSError as error:
            raise RunError(f"{command[0]} could not be started ({error.strerror}); install it") from None
        if done.returncode != 0:
            words = " ".join(done.stderr.split()) or f"status {done.returncode}"
            raise RunError(
                f"a lab command must succeed, but {' '.join(command)} failed: {words}; "
                "run penstock lab down and try again"
            )
        return done.stdout


class RecordingShell:
    """Runs nothing: keeps the commands, and answers those it was given answers for.

    >>> shell = RecordingShell({"ip netns list": "a\\n"})
    >>> shell.run(["ip", "netns", "list"]), shell.commands
    ('a\\n', ['ip netns list'])
    """

    def __init__(self, answers: Mapping[str, str | Exception] | None = None) -> None:
        self.commands: list[str] = []
        self.answers = dict(answers or {})

    def run(self, command: Sequence[str]) -> str:
        """Note the command and return its answer, or raise it when it is an exception."""
        line = " ".join(command)
        self.commands.append(line)
        answer = self.answers.get(line, "")
        if isinstance(answer, Exception):
            raise answer
        return answer
