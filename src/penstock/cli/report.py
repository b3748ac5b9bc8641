"""`penstock report`: the page of a run, and why it was not n times."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import JsonFile, make_console, write_json
from penstock.report.run_report import write_report
from penstock.terminal.progress import working


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that --trace was given.")],
    pictures: Annotated[bool, typer.Option(help="Also draw PNG and SVG files.")] = True,
    json: JsonFile = None,
) -> None:
    """Write a run's page, its trace for Perfetto, tables and pictures, and print the account."""
    console = make_console()
    with working("reading the run"):
        made = write_report(run, pictures=pictures)
    for line in made.lead:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{'devices together':28} {made.account.num_times:7.3f}", markup=False)
    for item in made.account.lines:
        console.print(f"{item.title:28} {-item.times:+7.3f}  {item.why}", markup=False, soft_wrap=True)
    console.print(f"{'measured':28} {made.account.speedup:7.3f}", markup=False)
    result = {
        "num_times": made.account.num_times, "speedup": made.account.speedup, "alone_s": made.account.baseline_s,
        "lines": [{"cause": item.key, "times": item.times, "why": item.why} for item in made.account.lines],
        "advice": list(made.advice), "files": [str(file) for file in made.files],
    }  # fmt: skip
    write_json(json, result)
    console.print(f"the page is {run / 'report.html'}", markup=False, soft_wrap=True)
