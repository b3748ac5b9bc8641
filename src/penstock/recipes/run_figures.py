"""The two figures of a comparison: training time and throughput, a bar for each way to train."""

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import UsageError
from penstock.recipes.several import Row
from penstock.zoo.optional import optional_import

_COLOR = "#3b6ea5"


def draw_comparison(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw `training_time.png` and `throughput.png`; returns their paths.

    Raises `UsageError` without matplotlib.
    """
    optional_import("matplotlib", "plot", UsageError)
    unit = next((row.result.last.unit for row in rows if row.result and row.result.last), "rows")
    times = [row.result.train_s if row.result else None for row in rows]
    rates = [row.result.units_per_s if row.result else None for row in rows]
    files = [folder / "training_time.png", folder / "throughput.png"]
    _bars(rows, times, "training time, s (mean over devices, without warm-up)", files[0])
    _bars(rows, rates, f"{unit}/s (sum over devices)", files[1])
    return files


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _bars(rows: Sequence[Row], values: Sequence[float | None], label: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 1.1 * len(rows), 3.6), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    axes.bar(places, [value or 0.0 for value in values], color=_COLOR, width=0.6)
    for place, row, value in zip(places, rows, values, strict=True):
        text = "out of memory" if row.out_of_memory else "failed" if value is None else _short(value)
        axes.annotate(text, (place, value or 0.0), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)
    names = [f"{row.name}\n{row.settings.num_processes} × device" for row in rows]
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=120)
