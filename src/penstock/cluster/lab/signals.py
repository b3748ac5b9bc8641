"""Signals that ask this process to end, taken as Ctrl-C is: with everything cleaned up behind it."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_WAY_OUT_S = 2.0  # for which signals after the block change nothing


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a polite signal leave the block by `SystemExit` with the status of a process that it ended, as 143.

    A second one does not cut short the cleaning up that the first one began, nor change the status on the way out;
    a closing terminal sends several. Signals that the program handles itself, or that it was told to ignore as by
    `nohup`, stay as they are; and only a main thread receives any.

    Example:
        with ended_by_signals():
            lab.up()
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = False

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        if not ending:
            ending = True
            raise SystemExit(128 + number)

    taken = [number for number in _ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, end)
        yield
    finally:
        late = _end_later(time.monotonic() + _WAY_OUT_S)
        for number in taken:
            signal.signal(number, late if ending else signal.SIG_DFL)


def _end_later(begin_s: float) -> Callable[[int, FrameType | None], None]:
    """Return a handler that ends the program from a time on: before that the program is on its way out."""

    def end(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() > begin_s:
            raise SystemExit(128 + number)

    return end


def ignore_late_signals(end: SystemExit) -> None:
    """In a program that such a signal ended: let no later one change its status on its way to its end."""
    if end.code in {128 + number for number in _ENDINGS}:
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)
