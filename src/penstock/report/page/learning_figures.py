"""Curves of training runs: loss, accuracy, throughput and learning rate over the steps, of one run or several."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.report.page.figures import PALETTE, ROW, Figure, finite, rows_of_axes
from penstock.report.page.tables import Cell, Table
from penstock.report.training.metrics import EpochLine, RunMetrics, StepLine
from penstock.text import counted

# a browser draws about this many points quickly; more steps are drawn as means of as many groups
_MAX_POINTS = 1000
_COLUMNS = ("epoch", "step", "training loss", "validation loss", "accuracy", "throughput")
Runs = Sequence[tuple[str, RunMetrics]]  # by name
_Point = tuple[int, float | None]


def learning_figure(runs: Runs) -> Figure:
    """Draw the curves of runs in rows with a common axis of steps, a colour for each run."""
    curves: list[tuple[str, list[list[_Point]]]] = [
        ("training loss", [_steps(run, lambda step: step.loss) for _, run in runs]),
        ("validation loss", [_epochs(run, lambda epoch: epoch.validation_loss) for _, run in runs]),
        ("accuracy", [_epochs(run, lambda epoch: epoch.accuracy) for _, run in runs]),
        (f"{_unit(runs)}/s", [_epochs(run, lambda epoch: epoch.units_per_s) for _, run in runs]),
        ("learning rate", [_steps(run, lambda step: step.learning_rate) for _, run in runs]),
    ]
    rows: list[tuple[float, list[dict[str, Any]], dict[str, Any]]] = []
    named: set[int] = set()
    for title, points in curves:
        traces = [
            {**_trace(points[number], name, title, PALETTE[number % len(PALETTE)]), "showlegend": number not in named}
            for number, (name, _) in enumerate(runs) if points[number]
        ]  # fmt: skip
        if traces:
            named |= {number for number, each in enumerate(points) if each}
            floor = "tozero" if title.endswith("/s") else "normal"
            rows.append((ROW, traces, {"title": {"text": title}, "rangemode": floor, "nticks": 5}))
    data, layout = rows_of_axes(rows, {"title": {"text": "step"}})
    titles = [axis["title"]["text"] for _, _, axis in rows]
    who = "" if len(runs) == 1 else f" A colour for each run: {', '.join(name for name, _ in runs)}."
    return Figure(
        "learning", "Curves", f"Steps from left to right; from the top {', '.join(titles)}.{who}", data,
        layout | {"showlegend": len(runs) > 1}, epochs_table(runs),
    )  # fmt: skip


def learning_lines(run: RunMetrics) -> list[str]:
    """Describe a run in one sentence: epochs, steps, losses, accuracy and throughput."""
    steps, epochs = run.steps, run.epochs
    parts = [
        counted(len(epochs), "epoch"),
        counted(max([*(s.step for s in steps), *(e.step for e in epochs)], default=0), "step"),
    ]
    if losses := [epoch.train_loss for epoch in epochs if epoch.train_loss is not None]:
        parts.append(f"training loss {losses[0]:.4g} to {losses[-1]:.4g}" if len(losses) > 1 else
                     f"training loss {losses[0]:.4g}")  # fmt: skip
    if epochs and epochs[-1].validation_loss is not None:
        parts.append(f"validation loss {epochs[-1].validation_loss:.4g}")
    if reached := [(epoch.accuracy, -epoch.epoch) for epoch in epochs if finite(epoch.accuracy) is not None]:
        best, at = max(reached)
        parts.append(f"accuracy {epochs[-1].accuracy:.2%} (best {best:.2%}, epoch {-at})")
    if epochs:
        parts.append(f"{epochs[-1].units_per_s:.4g} {epochs[-1].unit}/s")
    return [f"{', '.join(parts)}."]


def epochs_table(runs: Runs) -> Table:
    """Return the epochs of runs; with several runs the first column has the name."""
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs:
        for epoch in run.epochs:
            cells = (
                epoch.epoch, epoch.step, finite(epoch.train_loss), finite(epoch.validation_loss),
                finite(epoch.accuracy), f"{epoch.units_per_s:.4g} {epoch.unit}/s",
            )  # fmt: skip
            rows.append((name, *cells) if len(runs) > 1 else cells)
    columns = ("run", *_COLUMNS) if len(runs) > 1 else _COLUMNS
    return Table("epochs", "The epochs", columns, tuple(rows))


def _steps(run: RunMetrics, value: Callable[[StepLine], float | None]) -> list[_Point]:
    points = [(step.step, number) for step in run.steps if (number := finite(value(step))) is not None]
    size = -(-len(points) // _MAX_POINTS) or 1
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(number for _, number in group) / len(group)) for group in groups]


def _epochs(run: RunMetrics, value: Callable[[EpochLine], float | None]) -> list[_Point]:
    return [(epoch.step, number) for epoch in run.epochs if (number := finite(value(epoch))) is not None]


def _trace(points: Sequence[_Point], name: str, title: str, color: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines+markers" if len(points) <= 60 else "lines", "name": name,
        "legendgroup": name, "x": [step for step, _ in points], "y": [number for _, number in points],
        "line": {"color": color}, "hovertemplate": f"step %{{x}}: {title} %{{y:.4g}}",
    }  # fmt: skip


def _unit(runs: Runs) -> str:
    return next((run.epochs[0].unit for _, run in runs if run.epochs), "rows")
