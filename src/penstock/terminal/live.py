"""Live view of the stages (busy time, queue and rate of each), and progress of a training run.

Processes report progress with every heartbeat, twice a second; the view only reads these reports.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.terminal.progress import describing, how_far, progress_console, telling
from penstock.text import plain
from penstock.units import format_rate

# window of rates in seconds, long enough to be readable
_WINDOW_S = 5.0
_REFRESH_PER_S = 2.0


@dataclass(frozen=True, slots=True)
class StageState:
    """Counters of a stage so far: computed microbatches, seconds spent computing, bytes sent.

    `queue` is the number of microbatches that wait for the stage. The two ends of a cut report at different times, so
    it is only as exact as their heartbeats; it is limited to the capacity of the cut's buffers. A driver without a
    stage computes nothing.
    """

    name: str
    computed: int
    busy_s: float
    queue: int
    sent_bytes: int = 0
    computes: bool = True


class LiveView:
    """A view of the stages during a run.

    Example:
        with LiveView(console, look, total=500, unit="images") as view:
            for output in pipe.stream(images):
                view.advance()

    Without a terminal it prints one line that says so, and shows nothing.
    """

    def __init__(
        self,
        console: Console,
        look: Callable[[], Sequence[StageState]],
        *,
        total: int,
        unit: str,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
        shown: bool = True,
    ) -> None:
        self._console, self._look, self._clock = console, look, clock
        self._total, self._unit, self._done, self._start = total, unit, done, done
        self._note = ""
        self._began_s = clock()
        self._seen: deque[tuple[float, Sequence[StageState]]] = deque()
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=_REFRESH_PER_S, transient=True
        )
        self._shown = shown

    def __enter__(self) -> "LiveView":
        if self._shown and self._console.is_terminal:
            self._live.start()
        elif self._shown:
            self._console.print("a live view needs a terminal; continuing without it", markup=False)
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Advance the count; `note` is shown next to it."""
        self._done += count
        self._note = note or self._note

    def render(self) -> RenderableType:
        """Draw the current state."""
        now_s, states = self._clock(), self._look()
        # equal states are from the same heartbeat
        if not self._seen or states != self._seen[-1][1]:
            self._seen.append((now_s, states))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > _WINDOW_S:
            self._seen.popleft()
        table = Table.grid(padding=(0, 2))
        heads = ("stage", "busy", "", "waiting", "per second", "sends")
        table.add_row(*(Text(head, style="dim") for head in heads))
        before_s, before = self._seen[0]
        span_s = self._seen[-1][0] - before_s
        known = {state.name: state for state in before}
        for state in states:
            old, name = known.get(state.name), Text(plain(state.name))
            if old is None or span_s <= 0:
                table.add_row(name, "", "", str(state.queue), "", "")
                continue
            rate, sends = (state.computed - old.computed) / span_s, (state.sent_bytes - old.sent_bytes) / span_s
            link = format_rate(sends) if sends > 0 else ""
            if not state.computes:
                table.add_row(name, "", "", "", f"{rate:.1f}", link)
                continue
            busy = min(1.0, max(0.0, (state.busy_s - old.busy_s) / span_s))
            bar = ProgressBar(total=1.0, completed=busy, width=20)
            table.add_row(name, f"{busy:.0%}", bar, str(state.queue), f"{rate:.1f}", link)
        return Group(table, "", Text(self._overall(now_s)))

    def _overall(self, now_s: float) -> str:
        rate = (self._done - self._start) / max(1e-9, now_s - self._began_s)
        left = f", {_clock((self._total - self._done) / rate)} left" if rate > 0 else ""
        note = f", {self._note}" if self._note else ""
        return f"{self._done}/{self._total} {self._unit}, {rate:.1f}/s{left}{note}"


def _clock(seconds: float) -> str:
    """Format a duration like a clock.

    >>> _clock(75.4)
    '1:15'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


class FitProgress:
    """Progress of training on the first process; without a terminal, a line every half minute.

    With `look`, which returns the states of the stages, the stages are shown too.

    Example:
        with FitProgress(100, "images", shown=True) as progress:
            progress.advance(loss=0.7, rate=120.0)
    """

    def __init__(
        self,
        num_steps: int,
        unit: str,
        *,
        shown: bool,
        done: int = 0,
        look: Callable[[], Sequence[StageState]] | None = None,
    ) -> None:
        console = progress_console()
        self._unit, self._shown = unit, shown
        self._view = (
            None if look is None else LiveView(console, look, total=num_steps, unit="steps", done=done, shown=shown)
        )
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal) or console.quiet or self._view is not None,
        )
        self._task: TaskID = self._progress.add_task("train", total=num_steps, completed=done, now="")
        self._console, self._held = console, contextlib.ExitStack()
        self._left, self._done, self._now, self._began_s = num_steps - done, 0, "", time.monotonic()

    def __enter__(self) -> "FitProgress":
        if self._view is not None:
            self._held.enter_context(self._view)
        self._held.enter_context(self._progress)
        if self._shown:
            self._held.enter_context(telling(self._line, self._console))
        if self._shown and self._console.is_terminal:
            self._held.enter_context(describing("train", self._describe))
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _describe(self, text: str) -> None:
        self._progress.update(self._task, description=plain(text))
        if self._view is not None:
            self._view.advance(0, text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._shown:
            self._console.print(plain(text), markup=False, soft_wrap=True)

    def _line(self) -> str:
        return how_far(self._done, self._left, "steps", time.monotonic() - self._began_s) + self._now

    def advance(self, *, loss: float, rate: float) -> None:
        """Count one more completed step."""
        self._done, self._now = self._done + 1, f", loss {loss:.4f}"
        now = f"loss {loss:.4f}, {rate:.1f} {self._unit}/s"
        self._progress.update(self._task, advance=1, now=now)
        if self._view is not None:
            self._view.advance(note=now)
