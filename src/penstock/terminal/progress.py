"""What is being done, and for how long: on everything that may take more than a moment."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.terminal.console import PlainConsole
from penstock.text import plain

# says what is done now
Say = Callable[[str], None]


@contextlib.contextmanager
def working(what: str, console: Console | None = None) -> Iterator[Say]:
    """Show a line with what is being done and the time that it has taken, while something runs; gone at its end.

    Example:
        with working("measuring messages") as say:
            ...
            say("measuring the model")

    It goes to standard error, and where that is no terminal nothing is shown.
    """
    console = console or PlainConsole(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # what is printed meanwhile goes where standard output goes
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:  # fmt: skip
        task = progress.add_task(plain(what))
        yield lambda text: progress.update(task, description=plain(text))
