"""The report of a run's folder: page, trace, tables."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.plan.schedule.schedules import SCHEDULES
from penstock.report.advice import Advice, advise, advise_memory
from penstock.report.page.chrome import write_chrome_trace
from penstock.report.page.figures import Figure, loads, memory, throughput, timeline, waterfall
from penstock.report.page.page import Text, make_page
from penstock.report.page.plan_figures import plans_figure, plans_lines
from penstock.report.page.tables import (
    Table,
    account_table,
    clock_table,
    environment_table,
    generation_tables,
    link_table,
    markdown,
    plan_table,
    predicted_loads,
    stage_table,
)
from penstock.report.page.training_figures import learning_figure, learning_lines, training_figures, training_tables
from penstock.report.stream_account import Account, make_account, shape_of
from penstock.report.stream_measured import measure_stream
from penstock.report.training_account import advise_training, make_training_account
from penstock.report.training_measured import PlanLine, RunMetrics, measure_training, read_metrics
from penstock.text import counted
from penstock.tracing.trace import RUN_FILE, Run, read_run


@dataclass(frozen=True, slots=True)
class Report:
    """The written files, the account, and the plans if the run is also an elastic training run."""

    account: Account
    lead: tuple[str, ...]
    advice: tuple[str, ...]
    files: tuple[Path, ...]
    plans: tuple[PlanLine, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The report of a training run without a trace."""

    lead: tuple[str, ...]
    files: tuple[Path, ...]
    plans: tuple[PlanLine, ...]


def write_any_report(folder: str | os.PathLike[str]) -> Report | TrainingReport:
    """Write the report of a traced run, or of a training run's metrics if there is no trace.

    Example:
        write_any_report("runs/one").files

    Raises as `write_report` does.
    """
    place = Path(folder)
    metrics = None if (place / RUN_FILE).is_file() else read_metrics(place)
    return write_report(place) if metrics is None else write_training_report(place, metrics)


def write_report(folder: str | os.PathLike[str]) -> Report:
    """Read a run's folder and write its report into it.

    Writes `report.html`, `trace.json` for Perfetto, `tables.md` and a CSV file for each table.

    Example:
        write_report("runs/one").account.speedup

    Raises `DataError` if the folder has no complete run, `UsageError` if a package is not installed.
    """
    place = Path(folder)
    run = read_run(place)
    metrics = read_metrics(place)
    found = stream_contents(run) if run.facts.kind == "stream" else training_contents(run)
    figures = [figure for figure in found.figures if figure is not None]
    figures += metrics_figures(metrics, place) if metrics is not None else []
    lead = [*found.lead, *profiled_lines(run)]
    advice, to_do = found.advice, [*found.advice.to_do, *advise_memory(run)]
    texts = [Text("advice", "What to do", to_do)] if to_do else []
    # the lead already names the largest cause
    page = make_page(found.title, [*lead, *advice.known[1:]], figures, found.tables, texts)
    tables = [
        account_table(found.account),
        *(f.table for f in figures if f.key in {"loads", "learning", "plans"}),
        *found.tables,
    ]
    files = _write_files(place, page, tables)
    try:
        files.append(place / "trace.json")
        write_chrome_trace(run, files[-1])
    except OSError as error:
        raise _not_written(place, error) from None
    return Report(found.account, tuple(lead), (*advice.known, *to_do), tuple(files), metrics.plans if metrics else ())


def write_training_report(folder: Path, metrics: RunMetrics) -> TrainingReport:
    """Write the page and the tables of a training run without a trace.

    Raises `UsageError` if a package is not installed, or the folder cannot be written.
    """
    lead = learning_lines(metrics)
    if metrics.timeline is not None:
        lead += [*plans_lines(metrics.timeline), "Elastic training is not traced, so there is no account of lost time."]
    figures = metrics_figures(metrics, folder)
    page = make_page(f"Training in {folder.resolve().name}", lead, figures, [], [])
    files = _write_files(folder, page, [figure.table for figure in figures])
    return TrainingReport(tuple(lead), tuple(files), metrics.plans)


def metrics_figures(metrics: RunMetrics, folder: Path) -> list[Figure]:
    """Draw the curves of a training run, and its plans if it is elastic."""
    plans = metrics.timeline
    curves = [learning_figure([(folder.resolve().name, metrics)])] if metrics.steps or metrics.epochs else []
    return curves + ([plans_figure(plans)] if plans is not None else [])


def _write_files(place: Path, page: str, tables: Sequence[Table]) -> list[Path]:
    """Write the page, and the tables as Markdown and CSV; return the files."""
    texts = {"report.html": page, "tables.md": markdown(tables)} | {f"{t.key}.csv": t.csv() for t in tables}
    try:
        for name, text in texts.items():
            write_whole(place / name, text)
    except OSError as error:
        raise _not_written(place, error) from None
    return [place / name for name in texts]


def _not_written(place: Path, error: OSError) -> UsageError:
    return UsageError(f"{place} cannot be written ({error.strerror}); copy the run to another folder")


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a run's page; `tables` are the tables without a figure."""

    title: str
    account: Account
    lead: Sequence[str]
    advice: Advice
    figures: Sequence[Figure | None]
    tables: Sequence[Table]


def stream_contents(run: Run) -> Contents:
    """Return the contents of a stream's page."""
    stream = measure_stream(run)
    account = make_account(run, stream)
    facts = run.facts
    stages = stage_table(run, stream, predicted_loads(run))
    row = "tokens" if facts.generation is not None else "rows"
    done = f"{facts.num_rows} {row} in {facts.total_s:.2f} s, {facts.num_rows / facts.total_s:.4g} {row}/s"
    return Contents(
        title=f"{facts.model} in {shape_of(stream)}", account=account, lead=lead_lines(account, done),
        advice=advise(run, stream, account),
        figures=[waterfall(account, account_table(account)), timeline(run, stream), loads(run, stream, stages),
                 throughput(run), memory(run)],
        tables=[*generation_tables(run), link_table(run, stream), plan_table(run, stream), clock_table(run),
                environment_table(run)],
    )  # fmt: skip


def training_contents(run: Run) -> Contents:
    """Return the contents of a training run's page."""
    training = measure_training(run)
    account = make_training_account(run, training)
    facts, replicas = run.facts, len(training.replicas)
    each = f"{replicas} replicas of " if replicas > 1 else ""
    done = (
        f"{counted(len(training.steps), 'step')} in {training.seconds:.2f} s, "
        f"{training.num_rows / training.seconds:.4g} rows/s, "
        f"schedule {facts.schedule if facts.schedule in SCHEDULES else 'of your own'}"
    )
    return Contents(
        title=f"Training {facts.model} in {each}{counted(len(facts.cuts) + 1, 'stage')}",
        account=account,
        lead=lead_lines(account, done),
        advice=advise_training(run, training, account),
        figures=training_figures(run, training, account),
        tables=training_tables(run, training),
    )


def profiled_lines(run: Run) -> list[str]:
    """Describe the part of a run that torch.profiler slowed down."""
    seen = {(span.step, span.microbatch) for span in run.spans if span.kind == "profile"}
    if not seen:
        return []
    which = (
        f"step {min(seen)[0]}"
        if run.facts.kind == "training"
        else (f"microbatches {min(m for _, m in seen)} to {max(m for _, m in seen)}")
    )
    return [f"The profiler slowed {which} down, which counts as slower compute; without torch_profiler it would not."]


def lead_lines(account: Account, done: str) -> list[str]:
    """Describe the run's speed-up and the largest cause of lost time, in two sentences."""
    return [
        f"{done}: {account.speedup:.2f} times one device (ideal: {account.num_times:.2f}).",
        f"Most is lost to {account.largest.title} ({account.largest.times:.2f}): {account.largest.why}.",
    ]
