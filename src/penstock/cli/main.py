"""The `penstock` command: its subcommands, and the display of errors."""

import errno
import importlib
import os
import sys
import time
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.cluster import check_outputs, is_lab, refuse_bind, run_on_cluster, take_cluster
from penstock.cli.options import Verb, with_paths
from penstock.cluster.lab.processes import ignore_late_signals
from penstock.errors import PenstockError, UsageError
from penstock.resources import check_addresses, share_arena
from penstock.text import plain, say
from penstock.version import __version__

# subcommands import torch and other packages only when they run, so that help and usage errors are fast
_HELP = {
    "demo": "The whole workflow on this machine, no downloads.",
    "split": "Show the cuts of a model, and compare policies.",
    "convert": "Convert a checkpoint to safetensors.",
    "fits": "Count what each machine needs, before a start.",
    "profile": "Measure the cost of every part of a model.",
    "infer": "Classify images through a pipeline.",
    "generate": "Answer prompts with a language model.",
    "chat": "Talk to a language model.",
    "serve": "Answer over HTTP with the OpenAI API.",
    "train": "Train or fine-tune: stages, replicas, both.",
    "bench": "Measure a model serially and as pipelines.",
    "plan": "Choose how to run a model on a cluster.",
    "compress": "Prune and quantize a trained model.",
    "report": "Write a run's report: where the time went.",
    "schedule": "Draw a training schedule and its bubble.",
    "hosts": "Reach, prepare and measure the machines of a cluster.",
    "worker": "Join a running job.",
    "lab": "An emulated cluster on this machine (root).",
}
_OLD = {"bundle": "penstock split MODEL --plan PLAN -o FOLDER", "keys": "penstock hosts key FILE"}
_WITH = {"chat": "generate", "schedule": "plan", "worker": "hosts"}  # subcommands in the module of another one
_WITHOUT_MODELS = {"plan", "report", "schedule", "hosts", "lab", "--help", "--version"}
# if the first process fails, torchrun ends a machine's other processes within this time
_FIRST_SPEAKS_S = 3.0


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _Verbs(TyperGroup):
    """The subcommands; the module of each is imported when it runs."""

    _names_only = False

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the name of a subcommand, without importing its module."""
        self._names_only = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._names_only = False

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(_HELP)

    def get_command(self, _ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _OLD:
            raise UsageError(f"penstock {cmd_name} has another name: {_OLD[cmd_name]}")
        if cmd_name not in _HELP:
            return None
        if self._names_only:
            return TyperCommand(cmd_name, help=_HELP[cmd_name])
        module = importlib.import_module(f"penstock.cli.{_WITH.get(cmd_name, cmd_name)}")
        verb = typer.Typer(**_PLAIN)
        if hasattr(module, "app") and cmd_name not in _WITH:
            for each in module.app.registered_commands:
                each.callback = with_paths(each.callback)
            verb.add_typer(module.app, name=cmd_name)
            return typer.main.get_group(verb).commands[cmd_name]
        verb.command(cmd_name, cls=Verb)(with_paths(getattr(module, cmd_name)))
        return typer.main.get_command(verb)

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand; under torchrun only the first process of each machine prints an error that all report."""
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except Exception as error:
            if os.environ.get("TORCHELASTIC_RUN_ID") and os.environ.get("LOCAL_RANK", "0") != "0":
                if isinstance(error, PenstockError) and _has_joined():
                    raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
                time.sleep(_FIRST_SPEAKS_S)
            raise

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_HELP.items()))


def _has_joined() -> bool:
    """Return whether this process has joined a group, in which errors are reported to rank 0."""
    entry = sys.modules.get("penstock.group.entry")
    return entry is not None and entry.has_joined.is_set()


_PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    help="Run one PyTorch model across the machines you have.",
    **_PLAIN | {"add_completion": True},
)
_ON_CLUSTERS = {"bench", "chat", "generate", "infer", "serve", "train"}  # in a lab, `train` starts its own processes


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
    del debug, version  # --debug is read before typer starts, --version by its callback


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        cluster, rest = take_cluster(arguments) if arguments and arguments[0] in _ON_CLUSTERS else (None, arguments)
        if cluster is not None:
            refuse_bind(cluster, rest)
            check_outputs(cluster, rest)
            if arguments[0] != "train" or (cluster.exists() and not is_lab(cluster)):
                return run_on_cluster(cluster, rest)
        if arguments and arguments[0] not in _WITHOUT_MODELS:
            share_arena()
            check_addresses()
        app(arguments, standalone_mode=True)
    except SystemExit as end:
        ignore_late_signals(end)
        return int(end.code or 0)
    except KeyboardInterrupt:
        say("interrupted", err=True)
        return 130
    except OSError as error:
        if "--debug" in arguments or error.filename is not None or error.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more at the exit
        say(f"error: standard output cannot be written ({error.strerror}); free space, or send it elsewhere", err=True)
        return 1
    except PenstockError as error:
        if "--debug" in arguments:
            raise
        say(f"error: {plain(str(error))}", err=True)
        return 2 if isinstance(error, UsageError) else 1
    return 0
