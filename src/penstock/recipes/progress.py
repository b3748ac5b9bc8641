"""A bar with loss, throughput and time left, where there is a terminal."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class FitProgress:
    """Shows how far training is; says nothing without a terminal, and on all processes but the first.

    Example:
        with FitProgress(100, "images", shown=True) as progress:
            progress.advance(loss=0.7, rate=120.0)
    """

    def __init__(self, num_steps: int, unit: str, *, shown: bool, done: int = 0) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"), TextColumn(f"{{task.fields[rate]:.1f}} {unit}/s"),
            TimeRemainingColumn(), console=console, disable=not (shown and console.is_terminal), transient=True,
        )  # fmt: skip
        self._task: TaskID = self._progress.add_task(
            "train", total=num_steps, completed=done, loss=float("nan"), rate=0.0
        )

    def __enter__(self) -> "FitProgress":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, *, loss: float, rate: float) -> None:
        """One more step is done."""
        self._progress.update(self._task, advance=1, loss=loss, rate=rate)
