"""A bar with loss, throughput and time left, or the stages at work, where there is a terminal."""

from collections.abc import Callable, Sequence
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from penstock.terminal.console import PlainConsole
from penstock.terminal.live import LiveView, StageState


class FitProgress:
    """Shows how far training is; says nothing without a terminal, and on all processes but the first.

    With `look`, which says how far the stages are, it shows them too.

    Example:
        with FitProgress(100, "images", shown=True) as progress:
            progress.advance(loss=0.7, rate=120.0)
    """

    def __init__(
        self, num_steps: int, unit: str, *, shown: bool, done: int = 0,
        look: Callable[[], Sequence[StageState]] | None = None,
    ) -> None:  # fmt: skip
        console = PlainConsole(stderr=True)
        self._unit = unit
        self._view = None if look is None else LiveView(
            console, look, total=num_steps, unit="steps", done=done, shown=shown
        )  # fmt: skip
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"), TextColumn(f"{{task.fields[rate]:.1f}} {unit}/s"),
            TimeRemainingColumn(), console=console, transient=True,
            disable=not (shown and console.is_terminal) or self._view is not None,
        )  # fmt: skip
        self._task: TaskID = self._progress.add_task(
            "train", total=num_steps, completed=done, loss=float("nan"), rate=0.0
        )

    def __enter__(self) -> "FitProgress":
        if self._view is not None:
            self._view.__enter__()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._view is not None:
            self._view.__exit__(kind, error, traceback)

    def advance(self, *, loss: float, rate: float) -> None:
        """One more step is done."""
        self._progress.update(self._task, advance=1, loss=loss, rate=rate)
        if self._view is not None:
            self._view.advance(note=f"loss {loss:.4f}, {rate:.1f} {self._unit}/s")
