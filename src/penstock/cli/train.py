"""`penstock train`: training or fine-tuning of a model, in one mode or in several to compare."""

import contextlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from penstock.cli import options as opt
from penstock.cli.config import Given, named_options, takes_config
from penstock.cli.options import first_rank
from penstock.cluster.lab import lab_session, read_lab
from penstock.errors import RunError, UsageError, exclude
from penstock.plan.check import read_plan
from penstock.recipes.settings import SETTINGS, FitSettings, keep_settings, make_settings, read_settings
from penstock.resources import available_cores
from penstock.terminal.progress import working
from penstock.text import counted, say
from penstock.units import format_bytes, format_seconds
from penstock.wire import FEEDER

if TYPE_CHECKING:
    from penstock.cluster.lab import Lab
    from penstock.recipes.metrics import FitResult
    from penstock.recipes.several import Row


@takes_config(FitSettings)
def train(
    context: typer.Context,
    *,
    given: Given,
    bind: opt.Bind = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lab to train in; boards: `penstock hosts run`.")
    ] = None,
    compare: Annotated[str | None, typer.Option(help="Modes to compare: single,model,pipeline,data,both.")] = None,
    json: opt.JsonFile = None,
) -> None:
    """Train a model: in one process, in stages, in replicas, in both, with metrics and checkpoints in a folder."""
    with working("loading PyTorch", shown=first_rank()):
        from penstock.recipes import several  # noqa: F401 (takes seconds)

    opt.bind_to(bind, cluster)
    named = named_options(context)
    if given["batch_size"] is None:
        planned = read_plan(given["plan"]).batch_rows if given["plan"] is not None else None
        given["batch_size"] = planned or 32
        named |= {"batch_size"} if planned else set()
    given["track"] = given["track"] or []
    written = Path(given["output"]) / SETTINGS
    if given["resume"] and written.exists():
        given = keep_settings(given, named, read_settings(written))
    if missing := [name for name in ("MODEL", "--data") if given[name.strip("-").lower()] is None]:
        raise UsageError(
            f"a new run needs {' and '.join(missing)}; give {'them' if missing[1:] else 'it'}, or --resume with the "
            f"--output of a run: {written.parent} holds none"
        )
    settings = make_settings(given)
    if compare is None:
        _show_one(_train_one(settings, cluster), json)
        return
    names = [name.strip() for name in compare.split(",")]
    _check_compared(settings)
    with contextlib.nullcontext() if cluster is None else lab_session(read_lab(cluster)) as lab:
        _compare(settings, names, lab, json)


def _check_compared(settings: FitSettings) -> None:
    """Check that no option conflicts with the start of several runs; raises `UsageError`."""
    from penstock.group.entry import under_torchrun

    if under_torchrun():
        raise UsageError("--compare starts its processes itself; use it without torchrun")
    exclude("--plan", settings.plan is not None, "--compare chooses stages, replicas and batches itself")
    exclude("one of them", settings.trace is not None, "--compare starts several runs and --trace records one")


def _compare(settings: FitSettings, names: list[str], lab: "Lab | None", json: Path | None) -> None:
    """Train in several ways, and print a table of them."""
    from penstock.recipes.several import Row, draw_comparison, mode_runs, run_all

    console = opt.make_console()

    def tell(row: Row) -> None:
        console.print(f"{row.name}: {row.failed or 'done'}", markup=False)

    runs = mode_runs(names, settings, available_cores())
    rows = run_all(runs, lab, tell)
    console.print(_table(rows))
    document = {"rows": [row.document() for row in rows]}
    settings.folder.mkdir(parents=True, exist_ok=True)  # missing if no run could be started
    opt.write_json(settings.folder / "compare.json", document)
    opt.write_json(json, document)
    console.print(f"figures: {', '.join(str(path) for path in draw_comparison(rows, settings.folder))}")
    failed = [row for row in rows if row.failed is not None and not row.out_of_memory]
    if failed:
        raise RunError(f"{len(failed)} of {len(rows)} runs failed, the first one: {failed[0].name}: {failed[0].failed}")


def _table(rows: "list[Row]") -> Table:
    table = Table(
        "run", "processes", "batch", "training s", "per s", "validation loss", "accuracy", "memory", "what happened"
    )
    for row in rows:
        batch = str(row.settings.batch_size)
        if row.result is None:
            table.add_row(row.name, "", batch, "", "", "", "", "", "out of memory" if row.out_of_memory else "failed")
            continue
        found, last = row.result, row.result.last
        if last is None:
            table.add_row(row.name, str(found.num_processes), batch, "", "", "", "", "", "had ended before")
            continue
        table.add_row(
            row.name,
            str(found.num_processes),
            batch,
            f"{found.train_s:.1f}",
            f"{found.units_per_s:.1f} {last.unit}",
            _number(last.validation_loss),
            _percent(last.accuracy),
            format_bytes(max(last.peak_memory_bytes)),
            "done",
        )
    return table


def _train_one(settings: FitSettings, cluster: Path | None) -> "FitResult":
    """Train; if the run ends early, add to the error how it can be continued."""
    from penstock.recipes.launch import fit
    from penstock.recipes.metrics import how_to_continue

    try:
        return fit(settings, cluster)
    except RunError as error:
        if settings.join is not None or "--resume" in str(error):
            raise
        raise type(error)(f"{error}; {how_to_continue(settings)}") from error
    except KeyboardInterrupt:
        if settings.join is None and _is_first():
            say(f"interrupted; {how_to_continue(settings)}", err=True)
        raise typer.Exit(130) from None


def _is_first() -> bool:
    """Return whether this process prints the result: the only process, or the first of torchrun's."""
    from penstock.group.entry import under_torchrun

    return not under_torchrun() or int(os.environ["RANK"]) == FEEDER


def _show_one(result: "FitResult", json: Path | None) -> None:
    if not _is_first():
        return
    console = opt.make_console()
    opt.write_json(json, {"processes": result.num_processes, "epochs": result.epochs})
    if not result.trained:
        console.print(
            f"the run in {result.settings.folder} is finished: model, checkpoints and metrics are there; train on with "
            "larger --epochs or --steps, which count from the start",
            markup=False,
            soft_wrap=True,
        )
        return
    table = Table("epoch", "steps", "training loss", "validation loss", "accuracy", "training", "throughput")
    for epoch in result.epochs:
        table.add_row(
            str(epoch.epoch),
            str(epoch.step),
            _number(epoch.train_loss),
            _number(epoch.validation_loss),
            _percent(epoch.accuracy),
            format_seconds(epoch.train_s),
            f"{epoch.units_per_s:.1f} {epoch.unit}/s",
        )
    console.print(table)
    processes, folder = counted(result.num_processes, "process"), result.settings.folder
    console.print(
        f"{processes}; model, checkpoints and metrics are in {folder}; for its curves: penstock report "
        f"{shlex.quote(str(folder))}",
        markup=False,
        soft_wrap=True,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
