"""Progress lines with elapsed time, for operations that may take longer."""

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
# sets the current activity
Say = Callable[[str], None]


@contextlib.contextmanager
def working(what: str, console: Console | None = None) -> Iterator[Say]:
    """Show a line with the current activity and its elapsed time within the context; removed at its end.

    Example:
        with working("measuring messages") as say:
            ...
            say("measuring the model")

    It is written to standard error; if that is not a terminal, a plain line is printed every half a minute.
    """
    console = console or PlainConsole(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # concurrent prints stay on standard output
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
    """Print a plain line periodically if there is no terminal: a log, `nohup`, ssh.

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
