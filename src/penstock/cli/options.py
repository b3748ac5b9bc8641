"""Options that several verbs share."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.group.addresses import BIND, is_everywhere, listen
from penstock.spec.on_loss import ON_LOSS
from penstock.terminal.console import PlainConsole

Model = Annotated[str, typer.Argument(metavar="MODEL", help="timm:NAME, hf:NAME_OR_PATH or package.module:function.")]
WeightsFile = Annotated[Path | None, typer.Option("--weights", help="A safetensors file, index or folder.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Fetch the model's published weights.")]
Seed = Annotated[int, typer.Option(help="For random weights.")]
Policy = Annotated[str, typer.Option(help="balanced, equal-blocks, equal-size or smallest-crossing.")]
CutNames = Annotated[list[str] | None, typer.Option("--cut", metavar="PATH:after", help="Cut here; may be repeated.")]
MicrobatchSize = Annotated[int, typer.Option(min=1, help="Rows that go through the stages together.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads per stage.")]
ComputesOn = Annotated[
    str, typer.Option("--device", metavar="cpu|cuda", help="What stages compute on: cpu, or a GPU for each process.")
]
Runtime = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What computes the stages: eager, onnxruntime or openvino, with a precision as in onnxruntime:int8.",
    ),
]
OnLoss = Annotated[
    str | None,
    typer.Option(
        metavar="stop|continue|wait",
        help="When a device is lost: stop, go on with the others (the default unless --trace is given), or wait.",
    ),
]
WaitFor = Annotated[float, typer.Option("--wait-for", min=1.0, help="Seconds that --on-loss wait waits for another.")]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="DIR", help="Record what happens when, for `penstock report DIR`.")
]
Profiled = Annotated[
    bool, typer.Option("--profile", help="Also torch.profiler's operations of a few microbatches, into --trace DIR.")
]
Live = Annotated[bool, typer.Option("--live", help="Show the stages at work while it runs.")]
Bind = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Listen on this address; the one towards the first host, or on one machine none, if not given.",
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to this file.")]


def make_console() -> PlainConsole:
    """Make a console for results; what goes to a file or a pipe is not folded to 80 columns."""
    return PlainConsole(width=None if sys.stdout.isatty() else 160)


def write_json(path: Path | None, value: Any) -> None:
    """Write a verb's result for machines, if a file was asked for."""
    if path is None:
        return
    try:
        write_whole(path, json_module.dumps(value, indent=2, default=msgspec.to_builtins) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another --json") from None


def check_profiled(*, profile: bool, trace: Path | str | None) -> None:
    """Check that the profiler has a trace to write into; raises `UsageError` without one."""
    if profile and trace is None:
        raise UsageError("--profile writes into the run's trace; give --trace DIR too")


def choose_on_loss(on_loss: str | None, *, trace: Path | None) -> str:
    """Return what a stream does when a device is lost; raises `UsageError` for anything else than it can."""
    if on_loss is not None and on_loss not in ON_LOSS:
        raise UsageError(f"--on-loss takes {', '.join(ON_LOSS)}, not {on_loss!r}")
    if on_loss not in {None, "stop"} and trace is not None:
        raise UsageError("a run whose devices may change is not recorded; leave --trace or --on-loss out")
    return on_loss or ("stop" if trace is not None else "continue")


def bind_to(address: str | None, cluster: Path | None = None) -> None:
    """Have this process and those that it starts listen on this address only, if one was given.

    Raises `UsageError` for an address that is not this machine's, and for the hosts of a lab.
    """
    if address is None:
        return
    if cluster is not None:
        raise UsageError("--bind is for processes of this machine, and a lab's hosts have their own; leave it out")
    try:
        with listen(address) as listener:
            found = str(listener.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--bind takes an address of this machine, not {address!r} ({reason}); see `ip address`"
        ) from None
    if is_everywhere(found):
        raise UsageError(f"--bind takes one address, and {address!r} means all of this machine; see `ip address`")
    os.environ[BIND] = found


def parse_numbers(text: str, option: str) -> list[int]:
    """Read a list such as `1,2,4`; raises `UsageError` for anything else."""
    try:
        numbers = [int(item) for item in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} takes whole numbers from 1 up, separated by commas, not {text!r}")
    return numbers
