"""Options that several commands share."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from penstock.cli.paths import Written
from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.group.addresses import BIND, is_everywhere, listen
from penstock.runtime.registry import RUNTIMES
from penstock.spec.on_loss import ON_LOSS
from penstock.terminal.console import PlainConsole

Model = Annotated[str, typer.Argument(metavar="MODEL", help="timm:NAME, hf:NAME_OR_PATH or package.module:function.")]
LanguageModel = Annotated[str, typer.Argument(metavar="MODEL", help="hf:NAME_OR_PATH or gguf:FILE.")]
AnyModel = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="timm:NAME, hf:NAME_OR_PATH, gguf:FILE or package.module:function."),
]
WeightsFile = Annotated[Path | None, typer.Option("--weights", help="Safetensors file, index or folder.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download the model's published weights.")]
Preprocess = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="As in size=224x320,mean=0.5,std=0.5,crop_pct=1."),
]
Seed = Annotated[int, typer.Option(help="Seed of random weights, as in PyTorch.")]
Policy = Annotated[str, typer.Option(help="Cuts: balanced, equal-blocks, equal-size or smallest-crossing.")]
CutNames = Annotated[
    list[str] | None, typer.Option("--cut", metavar="PATH:after", help="Position of a cut; may be repeated.")
]
MicrobatchSize = Annotated[int, typer.Option(min=1, help="Rows per microbatch.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads per stage.")]
ComputesOn = Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="cpu, or cuda: a GPU for each process.")]
Runtime = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(RUNTIMES)}, with a precision as in onnxruntime:int8.",
    ),
]
OnLoss = Annotated[
    str | None,
    typer.Option(
        metavar="ACTION",
        help="If a device is lost: stop, continue, or wait for another. Default: continue; with --trace: stop.",
    ),
]
WaitFor = Annotated[float, typer.Option("--wait-for", min=1.0, help="Seconds to wait with --on-loss wait.")]
Trace = Annotated[
    Path | None,
    Written(is_folder=True),
    typer.Option("--trace", metavar="DIR", help="Record a trace in a folder, for `penstock report DIR`."),
]
Profiled = Annotated[
    bool, typer.Option("--torch-profiler", help="Record torch.profiler's operations too, in --trace DIR.")
]
Live = Annotated[bool, typer.Option("--live", help="Live view of the stages during the run.")]
Bind = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Listening address. Default: the first host's route.",
    ),
]
JsonFile = Annotated[
    Path | None, Written(), typer.Option("--json", metavar="FILE", help="File for the result as JSON.")
]


def make_console() -> PlainConsole:
    """Make a console for results; it does not wrap output to files and pipes at 80 columns."""
    return PlainConsole(width=None if sys.stdout.isatty() else 160)


def write_json(path: Path | None, value: Any) -> None:
    """Write a command's result as JSON, if a file was given."""
    if path is None:
        return
    try:
        write_whole(path, json_module.dumps(value, indent=2, default=msgspec.to_builtins) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another --json") from None


def check_profiled(*, profile: bool, trace: Path | str | None) -> None:
    """Check that the profiler has a trace to write into; raises `UsageError` without one."""
    if profile and trace is None:
        raise UsageError("--torch-profiler needs a trace to write into; give --trace DIR too")


def choose_on_loss(on_loss: str | None, *, trace: Path | None) -> str:
    """Return the action on a lost device; raises `UsageError` for other values."""
    if on_loss is not None and on_loss not in ON_LOSS:
        raise UsageError(f"--on-loss must be one of {', '.join(ON_LOSS)}; got {on_loss!r}")
    if on_loss not in {None, "stop"} and trace is not None:
        raise UsageError("a run whose devices may change cannot be traced; leave --trace or --on-loss out")
    return on_loss or ("stop" if trace is not None else "continue")


def bind_to(address: str | None, cluster: Path | None = None) -> None:
    """Restrict listening of this process and its children to one address, if given.

    Raises `UsageError` if the address is not this machine's, or if the processes run on the hosts of a lab.
    """
    if address is None:
        return
    if cluster is not None:
        raise UsageError(
            "--bind is for processes of this machine, and a lab's hosts have their own addresses; leave it out"
        )
    try:
        with listen(address) as listener:
            found = str(listener.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--bind must be an address of this machine; got {address!r} ({reason}); see `ip address`"
        ) from None
    if is_everywhere(found):
        raise UsageError(
            f"--bind must be a single address; {address!r} means all addresses of this machine; see `ip address`"
        )
    os.environ[BIND] = found


def parse_numbers(text: str, option: str) -> list[int]:
    """Parse a list such as `1,2,4`; raises `UsageError` for anything else."""
    try:
        numbers = [int(item) for item in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} must be integers of at least 1, separated by commas; got {text!r}")
    return numbers
