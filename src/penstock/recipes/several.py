"""Comparison of ways to train, each in separate processes; figures.

A run that fails becomes a row with its error; the other runs continue.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.cluster.lab import Lab
from penstock.errors import ClusterError, OutOfMemory, PenstockError, UsageError
from penstock.recipes.launch import fit_apart
from penstock.recipes.metrics import FitResult
from penstock.recipes.settings import FitSettings
from penstock.zoo.optional import optional_import

MODES = ("single", "model", "pipeline", "data", "both")
_COLOR = "#3b6ea5"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run among several: its name, and its result or error."""

    name: str
    settings: FitSettings
    result: FitResult | None = None
    failed: str | None = None
    out_of_memory: bool = False  # True if it failed because memory ran out

    def document(self) -> dict[str, Any]:
        """Return the row for a table or a file."""
        found, last = self.result, self.result.last if self.result else None
        return {
            "name": self.name,
            "failed": self.failed,
            "out_of_memory": self.out_of_memory,
            "processes": found.num_processes if found else None,
            "train_s": found.train_s if found else None,
            "units_per_s": found.units_per_s if found else None,
            "unit": last.unit if last else None,
            "train_loss": last.train_loss if last else None,
            "validation_loss": last.validation_loss if last else None,
            "accuracy": last.accuracy if last else None,
            "peak_memory_bytes": max(last.peak_memory_bytes) if last else None,
            "settings": msgspec.to_builtins(self.settings),
        }


def run_row(name: str, settings: FitSettings, lab: Lab | None) -> Row:
    """Train once in separate processes; returns a row for every error except wrong usage of the lab."""
    try:
        result = fit_apart(settings, lab=lab)
    except ClusterError:
        raise
    except PenstockError as error:
        return Row(name=name, settings=settings, failed=str(error), out_of_memory=isinstance(error, OutOfMemory))
    return Row(name=name, settings=settings, result=result)


def run_all(
    runs: Sequence[tuple[str, FitSettings]], lab: Lab | None, tell: Callable[[Row], None] = lambda _row: None
) -> list[Row]:
    """Train with all settings, one after the other, on this machine or in a lab."""
    rows = []
    for name, settings in runs:
        rows.append(run_row(name, settings, lab))
        tell(rows[-1])
    return rows


def mode_runs(names: Sequence[str], base: FitSettings, cores: int) -> list[tuple[str, FitSettings]]:
    """Return the settings of the modes to compare, all with the same number of threads per process.

    single: one process. model: stages in sequence, one microbatch. pipeline: stages with microbatches. data: replicas.
    both: replicas of a pipeline. Stages and replicas are the base's, by default two. The batch is the same in all
    modes.

    Raises `UsageError` for other names.
    """
    stages, replicas = base.cut_options.count(2), base.replicas or 2
    microbatches = base.microbatches or 2 * stages
    changes: dict[str, dict[str, Any]] = {
        "single": {"stages": 1, "cuts": None, "replicas": 1, "microbatches": None},
        "model": {"stages": stages, "replicas": 1, "microbatches": 1},
        "pipeline": {"stages": stages, "replicas": 1, "microbatches": microbatches},
        "data": {"stages": 1, "cuts": None, "replicas": replicas, "microbatches": None},
        "both": {"stages": stages, "replicas": replicas, "microbatches": microbatches},
    }
    strange = [name for name in names if name not in changes]
    if strange or not names:
        raise UsageError(f"the modes to compare must be among {', '.join(MODES)}; got {', '.join(strange) or 'none'}")
    runs = {name: base.replace(**changes[name], processes=None, output=str(base.folder / name)) for name in names}
    threads = base.threads or max(1, cores // max(settings.num_processes for settings in runs.values()))
    return [(name, settings.replace(threads=threads)) for name, settings in runs.items()]


def draw_comparison(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw `training_time.png` and `throughput.png`; returns their paths.

    Raises `UsageError` if matplotlib is not installed.
    """
    optional_import("matplotlib", "plot", UsageError)
    unit = next((row.result.last.unit for row in rows if row.result and row.result.last), "rows")
    times = [row.result.train_s if row.result else None for row in rows]
    rates = [row.result.units_per_s if row.result else None for row in rows]
    files = [folder / "training_time.png", folder / "throughput.png"]
    _bars(rows, times, "training time, s (mean over devices, without warm-up)", files[0])
    _bars(rows, rates, f"{unit}/s (sum over devices)", files[1])
    return files


def _bars(rows: Sequence[Row], values: Sequence[float | None], label: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 1.1 * len(rows), 3.6), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    axes.bar(places, [value or 0.0 for value in values], color=_COLOR, width=0.6)
    for place, row, value in zip(places, rows, values, strict=True):
        failed = "out of memory" if row.out_of_memory else "failed"
        text = failed if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        axes.annotate(text, (place, value or 0.0), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)
    batches = {row.settings.batch_size for row in rows}
    names = [
        f"{row.name}\n{row.settings.num_processes} × device"
        + (f"\nbatch {row.settings.batch_size}" if len(batches) > 1 else "")
        for row in rows
    ]
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=120)
