"""Termination signals, handled like Ctrl-C: with cleanup."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_WAY_OUT_S = 2.0  # signals within this time after the block have no effect


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Convert a termination signal to `SystemExit` with the usual exit status for that signal, such as 143.

    A second signal neither interrupts the cleanup nor changes the exit status; a closing terminal sends several.
    Signals that the program handles itself, or ignores as with `nohup`, are unchanged. Only the main thread receives
    signals.

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
    """Return a handler that ignores signals until `begin_s`, when the program should have exited, and ends it after."""

    def end(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() > begin_s:
            raise SystemExit(128 + number)

    return end


def ignore_late_signals(end: SystemExit) -> None:
    """Ignore further signals in a program that a signal has ended, so that its exit status does not change."""
    if end.code in {128 + number for number in _ENDINGS}:
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)
