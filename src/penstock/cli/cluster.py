"""`--cluster FILE`: a verb that starts itself on the machines of a cluster."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import bind_to
from penstock.cluster.lab import lab_session, read_lab
from penstock.cluster.lab.run import EndTogether, OutputLine, print_line
from penstock.errors import UsageError
from penstock.group.launcher import QUIET, module_command, module_path
from penstock.terminal.notes import say

Cluster = Annotated[
    Path | None, typer.Option("--cluster", metavar="lab.toml", help="Run there: one process on each of its hosts.")
]
_OPTION = "--cluster"


def take_cluster(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Take `--cluster FILE` out of a command line; raises `UsageError` when the file is missing.

    >>> take_cluster(["bench", "timm:vit", "--cluster", "lab.toml"])
    (PosixPath('lab.toml'), ['bench', 'timm:vit'])
    """
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument.startswith(f"{_OPTION}="):
            del rest[index]
            return Path(argument.partition("=")[2]), rest
        if argument == _OPTION:
            if index + 1 >= len(rest):
                raise UsageError("--cluster takes a file, as in --cluster lab.toml")
            path = Path(rest[index + 1])
            del rest[index : index + 2]
            return path, rest
    return None, rest


def run_on_cluster(path: Path, arguments: Sequence[str]) -> int:
    """Run `penstock` with these arguments on every host of a lab and return its exit status.

    What the first host prints is printed as it is; everything on standard error has the host in front.
    """
    bind = next((argument for argument in arguments if argument.partition("=")[0] == "--bind"), None)
    bind_to(bind, path)
    spec = read_lab(path)
    first = spec.hosts[0].name
    survives = _option(arguments, "--on-loss") in {"continue", "wait"}

    def show(line: OutputLine) -> None:
        if line.stream == "stdout" and line.host == first:
            say(line.text)
        elif line.stream == "stderr" and "hostname of the client socket" not in line.text:
            print_line(line)

    command = module_command("penstock", *arguments)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(lab_session(spec))
        env = {**QUIET, "PYTHONPATH": module_path()}
        ends: EndTogether = "first" if survives else True
        run = stack.enter_context(lab.start(command, env=env, output=show, end_together=ends))
        run.wait()
    codes = [code for host, code in run.exit_codes.items() if code and (host == first or not survives)]
    return 0 if not codes else (2 if codes[0] == 2 else 1)


def _option(arguments: Sequence[str], option: str) -> str | None:
    """Return what a command line gives for an option; None without it.

    >>> _option(["infer", "--on-loss", "wait"], "--on-loss"), _option(["infer", "--on-loss=wait"], "--on-loss")
    ('wait', 'wait')
    """
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else following
    return None
