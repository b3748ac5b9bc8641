"""Options that several commands share."""

import json as json_module
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import msgspec
import typer

from penstock.cli.paths import Written
from penstock.errors import UsageError, exclude
from penstock.files import write_whole
from penstock.group.addresses import BIND, is_everywhere, listen
from penstock.spec.plan import CacheDtype
from penstock.spec.settings import CUTS_HELP
from penstock.terminal.console import PlainConsole

Model = Annotated[str, typer.Argument(metavar="MODEL", help="timm:NAME, hf:NAME_OR_PATH or package.module:function.")]
AnyModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="timm:NAME, hf:NAME_OR_PATH, gguf:FILE or package.module:function.")
]
WeightsFile = Annotated[Path | None, typer.Option("--weights", help="Safetensors file, index or folder.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download the model's published weights.")]
OnDevice = Annotated[str, typer.Option(metavar="cpu|cuda", help="cpu, or cuda: the GPU of this machine.")]
Seed = Annotated[int, typer.Option(help="Seed of random weights, as in PyTorch.")]
CutNames = Annotated[list[str] | None, typer.Option("--cut", metavar="NAME", help=CUTS_HELP)]
MicrobatchSize = Annotated[int, typer.Option(min=1, help="Rows per microbatch.")]
CacheDtypeName = Annotated[
    str, typer.Option("--cache-dtype", help="Keys and values: model, float16, bfloat16 or int8.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads per stage.")]
Bind = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Listening address. Default: the first host's route.")
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


def bind_to(address: str | None, cluster: Path | None = None) -> None:
    """Restrict listening of this process and its children to one address, if given.

    Raises `UsageError` if the address is not this machine's, or if the processes run on the hosts of a lab.
    """
    if address is None:
        return
    exclude(
        "bind", cluster is not None, "bind is for this machine's processes, and a lab's hosts have their own addresses"
    )
    try:
        with listen(address) as listener:
            found = str(listener.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"bind must be an address of this machine; got {address!r} ({reason}); see `ip address`"
        ) from None
    if is_everywhere(found):
        raise UsageError(
            f"bind must be a single address; {address!r} means all addresses of this machine; see `ip address`"
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


def only_for(purpose: str, given: Mapping[str, Any], way: str = "", *, without: str = "") -> None:
    """Refuse options that have no effect here: those of `given`, by name, that are neither None, False nor empty.

    Raises `UsageError` naming them, their purpose and the way out: by default to omit them, or the option `without`.
    """
    names = [name for name, value in given.items() if value not in (None, False, "", [])]
    if names:
        way = way or f"leave it {f'or {without} ' if without else ''}out"
        raise UsageError(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} for {purpose}; {way}")


def cache_dtype(name: str) -> CacheDtype:
    """Return the dtype of keys and values that was given; raises `UsageError` for others."""
    if name not in get_args(CacheDtype):
        raise UsageError(f"--cache-dtype must be one of {', '.join(get_args(CacheDtype))}; got {name!r}")
    return cast(CacheDtype, name)
