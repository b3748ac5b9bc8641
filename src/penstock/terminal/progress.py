"""What is being done, and for how long: on everything that may take more than a moment."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.terminal.console import PlainConsole
from penstock.text import plain

EVERY_S = 30.0
# says what is done now
Say = Callable[[str], None]


@contextlib.contextmanager
def working(what: str, console: Console | None = None) -> Iterator[Say]:
    """Show a line with what is being done and the time that it has taken, while something runs; gone at its end.

    Example:
        with working("measuring messages") as say:
            ...
            say("measuring the model")

    It goes to standard error; where that is no terminal a plain line comes every half a minute.
    """
    console = console or PlainConsole(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # what is printed meanwhile goes where standard output goes
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:  # fmt: skip
        task = progress.add_task(plain(what))
        began_s, now = time.monotonic(), [what]

        def say(text: str) -> None:
            now[0] = text
            progress.update(task, description=plain(text))

        with telling(lambda: f"still {now[0]}, {time.monotonic() - began_s:.0f} s so far", console):
            yield say


@contextlib.contextmanager
def telling(line: Callable[[], str], console: Console, every_s: float = EVERY_S) -> Iterator[None]:
    """Write a plain line every so often where there is no terminal to draw on: a log, `nohup`, ssh.

    Example:
        with telling(lambda: f"{done} of {total} images", PlainConsole(stderr=True)):
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
    """Return how far something is and how long it will still take.

    >>> how_far(120, 500, "images", 40.0)
    '120 of 500 images, 3.0 images/s, about 2 min left'
    """
    if not done or not seconds:
        return f"{done} of {total} {unit}"
    left_s = (total - done) * seconds / done
    return f"{done} of {total} {unit}, {done / seconds:.1f} {unit}/s, about {duration(left_s)} left"


def duration(seconds: float) -> str:
    """Return seconds as people say them.

    >>> duration(40.2), duration(600.0)
    ('40 s', '10 min')
    """
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
