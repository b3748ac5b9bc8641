"""Progress lines with elapsed time, for operations that may take longer."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from penstock.text import plain

if TYPE_CHECKING:  # rich is loaded where a line is shown; a worker shows none
    from rich.console import Console

PROGRESS = "PENSTOCK_PROGRESS"  # 0: no progress on standard error
FIRST_S = 2.0
EVERY_S = 30.0
# sets the current activity
Say = Callable[[str], None]


class _Activity:
    """The activity that is shown now; nested contexts replace it for their duration."""

    def __init__(self, text: str, show: Say) -> None:
        self.text, self._show = text, show

    def say(self, text: str) -> None:
        self.text = text
        self._show(text)


_shown: ContextVar[_Activity | None] = ContextVar("shown", default=None)


def progress_console() -> "Console":
    """Make a console on standard error for progress, quiet with `PENSTOCK_PROGRESS=0`.

    It keeps the current standard error, which a capture redirects.
    """
    from penstock.terminal.console import PlainConsole

    return PlainConsole(file=sys.stderr, quiet=os.environ.get(PROGRESS) == "0")


@contextlib.contextmanager
def working(
    what: str,
    console: "Console | None" = None,
    *,
    shown: bool = True,
    first_s: float = FIRST_S,
    every_s: float = EVERY_S,
) -> Iterator[Say]:
    """Show a line with the current activity and its elapsed time within the context; removed at its end.

    Example:
        with working("measuring messages") as say:
            ...
            say("measuring the model")

    It is written to standard error. If that is not a terminal, a plain line is printed for each activity of more than
    `first_s` seconds, and again every `every_s` seconds. A nested context changes the line of the outer one. Pass
    `shown=False` in every process but one.
    """
    outer = _shown.get()
    if not shown:
        yield lambda _: None
    elif outer is not None:
        before = outer.text
        outer.say(what)
        try:
            yield outer.say
        finally:
            outer.say(before)
    else:
        console = console or progress_console()
        line = _spinner if console.is_terminal else partial(_lines, first_s=first_s, every_s=every_s)
        with line(what, console) as show, describing(what, show) as say:
            yield say


@contextlib.contextmanager
def describing(what: str, show: Say) -> Iterator[Say]:
    """Let nested `working` contexts change a description that is shown already, by calling `show`."""
    activity = _Activity(what, show)
    token = _shown.set(activity)
    try:
        yield activity.say
    finally:
        _shown.reset(token)


@contextlib.contextmanager
def _spinner(what: str, console: "Console") -> Iterator[Say]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # concurrent prints stay on standard output
    with Progress(
        *columns, console=console, transient=True, disable=console.quiet, redirect_stdout=sys.stdout.isatty()
    ) as progress:
        task = progress.add_task(plain(what))
        yield lambda text: progress.update(task, description=plain(text))


@contextlib.contextmanager
def _lines(what: str, console: "Console", *, first_s: float, every_s: float) -> Iterator[Say]:
    """Print each activity that lasts, and that it still does."""
    began_s = time.monotonic()
    now, changed, ended = [(what, began_s)], threading.Event(), threading.Event()

    def tell() -> None:
        told, told_s = set(), began_s
        while True:
            text, since_s = now[0]
            due_s = told_s + every_s if text in told else since_s + first_s
            if changed.wait(max(0.0, due_s - time.monotonic())):
                changed.clear()
                if ended.is_set():
                    return
                continue
            told_s = time.monotonic()
            line = f"still {text}, {told_s - began_s:.0f} s so far" if text in told else text
            told.add(text)
            console.print(plain(line), soft_wrap=True)

    def show(text: str) -> None:
        now[0] = text, time.monotonic()
        changed.set()

    thread = threading.Thread(target=tell, name="penstock-tell", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        changed.set()
        thread.join()


@contextlib.contextmanager
def telling(line: Callable[[], str], console: "Console", every_s: float = EVERY_S) -> Iterator[None]:
    """Print a plain line periodically if there is no terminal: a log, `nohup`, ssh.

    Example:
        with telling(lambda: f"{done} of {total} images", progress_console()):
            ...
    """
    if console.is_terminal:
        yield
        return
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every_s):
            console.print(plain(line()), soft_wrap=True)

    thread = threading.Thread(target=tell, name="penstock-tell", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def how_far(done: int, total: int, unit: str, seconds: float) -> str:
    """Return the progress and the remaining time.

    >>> how_far(120, 500, "images", 40.0)
    '120 of 500 images, 3.0 images/s, about 2 min left'
    """
    if not done or not seconds:
        return f"{done} of {total} {unit}"
    left_s = (total - done) * seconds / done
    return f"{done} of {total} {unit}, {done / seconds:.1f} {unit}/s, about {duration(left_s)} left"


def duration(seconds: float) -> str:
    """Format seconds for display.

    >>> duration(40.2), duration(600.0)
    ('40 s', '10 min')
    """
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
