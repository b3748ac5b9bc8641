"""Several training runs in separate processes: sweeps, comparison of modes, search for the largest batch; figures.

A run that fails becomes a row with its error; the other runs continue.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.cluster.lab import Lab
from penstock.errors import ClusterError, OutOfMemory, PenstockError, RunError, UsageError
from penstock.paths import check_paths
from penstock.recipes.launch import fit_apart
from penstock.recipes.metrics import FitResult
from penstock.recipes.settings import FitSettings, make_settings
from penstock.spec.fields import decode_toml, read_bytes
from penstock.zoo.optional import optional_import

MODES = ("single", "model", "pipeline", "data", "both")
_STEPS = 2  # steps per trial of a batch size: in the second, the optimizer's state exists
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
            "name": self.name, "failed": self.failed, "out_of_memory": self.out_of_memory,
            "processes": found.num_processes if found else None, "train_s": found.train_s if found else None,
            "units_per_s": found.units_per_s if found else None, "unit": last.unit if last else None,
            "train_loss": last.train_loss if last else None, "validation_loss": last.validation_loss if last else None,
            "accuracy": last.accuracy if last else None,
            "peak_memory_bytes": max(last.peak_memory_bytes) if last else None,
            "settings": msgspec.to_builtins(self.settings),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs take place: on this machine, with an optional memory limit per process, or in a lab."""

    lab: Lab | None = None
    memory_bytes: int | None = None


def run_row(name: str, settings: FitSettings, place: Place) -> Row:
    """Train once in separate processes; returns a row for every error except wrong usage of the lab."""
    try:
        result = fit_apart(settings, lab=place.lab, memory_bytes=place.memory_bytes)
    except ClusterError:
        raise
    except PenstockError as error:
        return Row(name=name, settings=settings, failed=str(error), out_of_memory=isinstance(error, OutOfMemory))
    return Row(name=name, settings=settings, result=result)


def run_all(
    runs: Sequence[tuple[str, FitSettings]], place: Place, tell: Callable[[Row], None] = lambda _row: None
) -> list[Row]:
    """Train with all settings, one after the other."""
    rows = []
    for name, settings in runs:
        rows.append(run_row(name, settings, place))
        tell(rows[-1])
    return rows


def read_sweep(path: Path, base: FitSettings) -> list[tuple[str, FitSettings]]:
    """Read a table of settings, each with changes to the base settings.

    [[settings]]
    name = "large batches"
    batch_size = 256

    Raises `UsageError` if the file cannot be read, or has no or invalid settings.
    """
    document = decode_toml(read_bytes(path, "a table of settings", UsageError), f"{path}", UsageError)
    tables: Any = document.get("settings")
    whole = isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)
    if not whole or set(document) != {"settings"}:
        raise UsageError(f"settings not found in {path}; write [[settings]] tables, each with its changes")
    runs: list[tuple[str, FitSettings]] = []
    for index, table in enumerate(tables):
        name = str(table.pop("name", f"row {index + 1}"))
        folder = str(base.folder / f"{index + 1:02}")
        runs.append((name, make_settings({**msgspec.to_builtins(base), "output": folder, **table})))
        _check_inputs(runs[-1][1])
    return runs


def _check_inputs(run: FitSettings) -> None:
    """Raise `UsageError` if a run of a table would replace its own inputs; those of options are checked before."""
    names = ("weights", "teacher", "data", "validation", "plan", "schedule")
    read = [(name, Path(path)) for name in names if (path := getattr(run, name))]
    check_paths(read, [("output", run.folder)])


def mode_runs(
    names: Sequence[str], base: FitSettings, cores: int, *, weak_scaling: bool = False
) -> list[tuple[str, FitSettings]]:  # fmt: skip
    """Return the settings of the modes to compare, all with the same number of threads per process.

    single: one process. model: stages in sequence, one microbatch. pipeline: stages with microbatches. data: replicas.
    both: replicas of a pipeline. Stages and replicas are the base's, by default two. The batch is the same in all
    modes, or with `weak_scaling` the base's batch times the number of processes.

    Raises `UsageError` for other names.
    """
    stages = len(base.cuts) + 1 if base.cuts is not None else base.stages or 2
    replicas = base.replicas or 2
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
    runs = {name: base.replace(**changes[name], devices=None, output=str(base.folder / name)) for name in names}
    if weak_scaling:
        runs = {name: run.replace(batch_size=run.batch_size * run.num_processes) for name, run in runs.items()}
    threads = base.threads or max(1, cores // max(settings.num_processes for settings in runs.values()))
    return [(name, settings.replace(threads=threads)) for name, settings in runs.items()]


def ablation_runs(base: FitSettings) -> list[tuple[str, FitSettings]]:
    """Return settings that isolate the parts of elastic training; all except the first freeze the same layers.

    none: the initial placement. freeze: no migration. pack + cache: one pipeline, on the fastest number of devices,
    that reads cached outputs of frozen layers. pack + replicate: also more pipelines, without a cache. all: all parts.
    """
    off = {"pack": False, "replicate": False, "cache": False}
    changes: dict[str, dict[str, Any]] = {
        "none": {"freeze": "none", **off},
        "freeze": off,
        "freeze, pack, cache": {"replicate": False},
        "freeze, pack, replicate": {"cache": False},
        "all": {},
    }
    return [
        (name, base.replace(elastic=True, output=str(base.folder / name.replace(", ", "-")), **change))
        for name, change in changes.items()
    ]


def find_largest_batch(
    settings: FitSettings, place: Place, tell: Callable[[Row], None] = lambda _row: None
) -> tuple[int, list[Row]]:
    """Double the batch until it no longer fits, then bisect; return the size and every trial.

    Each trial runs two steps in separate processes. The result is exact to one sixteenth, and at most the number of
    rows of the data.

    Raises `RunError` if a trial fails for a reason other than memory, or if the smallest batch does not fit.
    """
    rows: list[Row] = []
    tried: list[int] = []  # actual sizes of batches
    smallest = (settings.replicas or 1) * (settings.microbatches or 1)

    def fits(size: int) -> bool:
        asked = settings.replace(
            batch_size=size, steps=_STEPS, validate=False, save=False, resume=False, num_rows=None,
            output=str(settings.folder / f"batch-{size}"),
        )  # fmt: skip
        row = run_row(f"batch {size}", asked, place)
        rows.append(row)
        tell(row)
        if row.failed is not None and not row.out_of_memory:
            raise RunError(f"a batch of {size} failed for a reason other than memory: {row.failed}")
        if row.result is None:
            return False
        tried.append(max(epoch.batch_rows for epoch in row.result.epochs))
        peak = max(max(epoch.peak_memory_bytes) for epoch in row.result.epochs)
        return place.memory_bytes is None or peak <= place.memory_bytes

    if not fits(smallest):
        raise RunError(f"not even a batch of {smallest} fits; use more stages, or --checkpointing")
    good, bad = smallest, 2 * smallest
    while fits(bad):
        good, bad = bad, 2 * bad
        if tried[-1] < good:
            return tried[-1], rows
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, rows


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
