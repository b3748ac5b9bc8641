"""The `penstock` command: verbs, and how errors reach people."""

import sys
from typing import Annotated

import typer

from penstock.cli import (
    bench,
    bundle,
    compress,
    convert,
    demo,
    hosts,
    infer,
    lab,
    plan,
    profile,
    report,
    schedule,
    split,
    train,
)
from penstock.cli.cluster import run_on_cluster, take_cluster
from penstock.cluster.lab.signals import ignore_late_signals
from penstock.errors import PenstockError, UsageError
from penstock.terminal.notes import say
from penstock.text import plain
from penstock.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run one PyTorch model across the machines you have.",
)
app.command("demo")(demo.demo)
app.command("split")(split.split)
app.command("convert")(convert.convert)
app.command("profile")(profile.profile)
app.command("bundle")(bundle.bundle)
app.command("infer")(infer.infer)
app.command("train")(train.train)
app.command("bench")(bench.bench)
app.command("plan")(plan.plan)
app.command("compress")(compress.compress)
app.add_typer(hosts.app, name="hosts")
app.command("report")(report.report)
app.command("schedule")(schedule.schedule)
app.add_typer(lab.app, name="lab")

_ON_CLUSTERS = {"bench", "infer"}


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del debug, version  # read before typer starts, and by its callback


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        cluster, rest = take_cluster(arguments) if arguments and arguments[0] in _ON_CLUSTERS else (None, arguments)
        if cluster is not None:
            return run_on_cluster(cluster, rest)
        app(arguments, standalone_mode=True)
    except SystemExit as end:
        ignore_late_signals(end)
        return int(end.code or 0)
    except KeyboardInterrupt:
        say("interrupted", err=True)
        return 130
    except PenstockError as error:
        if "--debug" in arguments:
            raise
        say(f"error: {plain(str(error))}", err=True)
        return 2 if isinstance(error, UsageError) else 1
    return 0
