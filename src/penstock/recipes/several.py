"""Several training runs, each in processes of its own: what fails is a row, not the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from penstock.cluster.lab import Lab
from penstock.errors import ClusterError, OutOfMemory, PenstockError, UsageError
from penstock.recipes.metrics import FitResult
from penstock.recipes.settings import FitSettings, make_settings
from penstock.recipes.start import fit_apart


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run among several: its name, and what came out or why nothing did."""

    name: str
    settings: FitSettings
    result: FitResult | None = None
    failed: str | None = None
    out_of_memory: bool = False  # why it failed

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
    """Where runs take place: on this machine, with a limit of memory for each process if given, or in a lab."""

    lab: Lab | None = None
    memory_bytes: int | None = None


def run_row(name: str, settings: FitSettings, place: Place) -> Row:
    """Train once in processes of its own; returns a row in any case but wrong usage of the lab."""
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
    """Train with each of the settings, one after the other."""
    rows = []
    for name, settings in runs:
        rows.append(run_row(name, settings, place))
        tell(rows[-1])
    return rows


def read_sweep(path: Path, base: FitSettings) -> list[tuple[str, FitSettings]]:
    """Read a table of settings; each changes some of the base's.

    [[settings]]
    name = "large batches"
    batch_size = 256

    Raises `UsageError` for a file that cannot be read, no settings, and wrong ones.
    """
    try:
        document = msgspec.toml.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} cannot be read as TOML ({error}); give a file of [[settings]] tables") from None
    tables = document.get("settings")
    if not _are_tables(tables) or set(document) != {"settings"}:
        raise UsageError(f"{path} holds no settings; write [[settings]] tables, each with what it changes")
    runs: list[tuple[str, FitSettings]] = []
    for index, table in enumerate(tables):
        name = str(table.pop("name", f"row {index + 1}"))
        folder = str(base.folder / f"{index + 1:02}")
        runs.append((name, make_settings({**msgspec.to_builtins(base), "output": folder, **table})))
    return runs


def _are_tables(found: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(found, list) and bool(found) and all(isinstance(table, dict) for table in found)


MODES = ("single", "model", "pipeline", "data", "both")


def mode_runs(names: Sequence[str], base: FitSettings, cores: int) -> list[tuple[str, FitSettings]]:
    """Return the settings of the modes to compare, all with the same threads for each process.

    single: one process. model: stages one after the other, one microbatch. pipeline: stages with microbatches.
    data: replicas. both: replicas of a pipeline. Stages and replicas are the base's, two where not given.

    Raises `UsageError` for other names.
    """
    stages, replicas = base.stages or 2, base.replicas or 2
    microbatches = base.microbatches or 2 * stages
    changes: dict[str, dict[str, Any]] = {
        "single": {"stages": 1, "replicas": 1, "microbatches": None},
        "model": {"stages": stages, "replicas": 1, "microbatches": 1},
        "pipeline": {"stages": stages, "replicas": 1, "microbatches": microbatches},
        "data": {"stages": 1, "replicas": replicas, "microbatches": None},
        "both": {"stages": stages, "replicas": replicas, "microbatches": microbatches},
    }
    strange = [name for name in names if name not in changes]
    if strange or not names:
        raise UsageError(f"the modes to compare are {', '.join(MODES)}, not {', '.join(strange) or 'none'}")
    runs = {name: base.replace(**changes[name], devices=None, output=str(base.folder / name)) for name in names}
    threads = base.threads or max(1, cores // max(settings.num_processes for settings in runs.values()))
    return [(name, settings.replace(threads=threads)) for name, settings in runs.items()]
