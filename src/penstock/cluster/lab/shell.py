"""Calls of the programs that change the network, `ip` and `tc`; replaceable in tests."""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Protocol

from penstock.errors import RunError

_DEADLINE_S = 30.0


class Shell(Protocol):
    """A shell that runs one program to its end and returns its output."""

    def run(self, command: Sequence[str]) -> str:
        """Run a command; raises `RunError` if it fails."""
        ...


class SystemShell:
    """Runs programs of this machine, each with a deadline.

    >>> SystemShell().run(["echo", "hello"])
    'hello\\n'
    """

    def run(self, command: Sequence[str]) -> str:
        """Run a command; raises `RunError` if it fails, with what it wrote to standard error, or takes too long."""
        try:
            with _signals_wait():
                # inherits open files: a command that outlives its killed caller keeps holding the lock under which it
                # runs
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_DEADLINE_S, stdin=subprocess.DEVNULL,
                    close_fds=False,
                )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RunError(
                f"a lab command must end within {_DEADLINE_S:g} s, but {' '.join(command)} did not; "
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


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay termination signals until the end of the block; only the main thread receives signals.

    If a handler raises inside `subprocess`, the lock on the child may stay held, and waiting for the child never
    returns. The programs run here take milliseconds, so the delay is short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for waited in came:
            signal.raise_signal(waited)


class RecordingShell:
    """A shell that runs nothing: it records the commands, and returns the given answers.

    >>> shell = RecordingShell({"ip netns list": "a\\n"})
    >>> shell.run(["ip", "netns", "list"]), shell.commands
    ('a\\n', ['ip netns list'])
    """

    def __init__(self, answers: Mapping[str, str | Exception] | None = None) -> None:
        self.commands: list[str] = []
        self.answers = dict(answers or {})

    def run(self, command: Sequence[str]) -> str:
        """Record the command and return its answer, or raise it if it is an exception."""
        line = " ".join(command)
        self.commands.append(line)
        answer = self.answers.get(line, "")
        if isinstance(answer, Exception):
            raise answer
        return answer
