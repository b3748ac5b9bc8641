"""`penstock report`: the page of a run, with a breakdown of its speed-up."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Column, Table

from penstock.cli.options import JsonFile, Written, make_console, only_for, write_json
from penstock.report.comparison import write_comparison
from penstock.report.page.tables import show
from penstock.report.run_report import TrainingReport, write_any_report
from penstock.terminal.progress import working


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folder of --trace or of penstock train; several folders of one kind are compared."
        ),
    ],
    output: Annotated[
        Path | None, Written(), typer.Option("-o", "--output", help="Page of several runs.  [default: beside.html]")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Write a run's page and tables, and print where its time went or how it learned; or compare runs."""
    console = make_console()
    if len(runs) > 1:
        _beside(runs, output or Path("beside.html"), json)
        return
    only_for("several runs", {"--output": output}, "the page of a single run is in the run's folder; leave it out")
    (run,) = runs
    with working("reading the run"):
        made = write_any_report(run)
    for line in made.lead:
        console.print(line, markup=False, soft_wrap=True)
    result: dict[str, Any] = {
        "plans": [msgspec.to_builtins(plan) for plan in made.plans],
        "files": [str(file) for file in made.files],
    }
    if not isinstance(made, TrainingReport):
        account = made.account
        console.print(f"{'devices together':28} {account.num_times:7.3f}", markup=False)
        for item in account.lines:
            console.print(f"{item.title:28} {-item.times:+7.3f}  {item.why}", markup=False, soft_wrap=True)
        console.print(f"{'measured':28} {account.speedup:7.3f}", markup=False)
        lines = [{"cause": item.key, "times": item.times, "why": item.why} for item in account.lines]
        result |= {
            "num_times": account.num_times,
            "speedup": account.speedup,
            "alone_s": account.baseline_s,
            "lines": lines,
            "advice": list(made.advice),
        }
    write_json(json, result)
    console.print(f"the page is {run / 'report.html'}", markup=False, soft_wrap=True)


def _beside(runs: list[Path], output: Path, json: Path | None) -> None:
    """Write the page of several runs, and print the differences."""
    console = make_console()
    with working("reading the runs"):
        made = write_comparison(runs, output)
    for line in made.lead:
        console.print(line, markup=False, soft_wrap=True)
    differences, *others = made.tables
    what, *names = differences.columns
    table = Table(what, *(Column(name, overflow="fold", justify="right") for name in names))
    for row in differences.rows:
        table.add_row(*(show(cell) for cell in row))
    console.print(table)
    write_json(
        json,
        {
            "runs": names,
            "differences": [list(row) for row in differences.rows],
            **{table.key: [list(row) for row in table.rows] for table in others},
            "files": [str(file) for file in made.files],
        },
    )
    console.print(f"the page is {output}", markup=False, soft_wrap=True)
