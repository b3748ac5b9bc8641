"""Options of commands: those that several share, the paths among them, and their help.

Paths are read unless declared as `Written`, and checked before the command runs. Help has the options in groups, one
line each if they fit into 80 columns.
"""

import functools
import inspect
import json as json_module
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import msgspec
import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, ParameterInfo

from penstock.errors import UsageError, exclude
from penstock.files import check_paths, check_writable, is_stdout, write_whole
from penstock.group.addresses import BIND, is_everywhere, listen
from penstock.group.launcher import KEY, launcher_variables
from penstock.spec.plan import CacheDtype
from penstock.spec.settings import CUTS_HELP
from penstock.terminal.console import PlainConsole
from penstock.wire import FEEDER

# options whose texts are paths or other words
_PATH_TEXTS = frozenset({"class_order", "data", "images", "schedule", "test", "validation"})
_Named = tuple[str, Path]


@dataclass(frozen=True, slots=True)
class Written:
    """Mark in the annotation of an option for a path that the command writes, or for a folder of its own files.

    Example:
        output: Annotated[Path, Written(), typer.Option("--output", "-o")]
    """

    is_folder: bool = False
    is_compared: bool = True  # false: files in the folder are never another's


Declared = tuple[str, Written | None]


def first_rank() -> bool:
    """Return whether this process writes the results, without loading PyTorch: the only one, or a launcher's first."""
    rank = os.environ.get("RANK") or launcher_variables(os.environ).get("RANK", "")
    return not rank.isdecimal() or int(rank) == FEEDER


def with_paths(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose paths are checked before it runs (see `checked`)."""
    if hasattr(verb, "checks_paths"):
        return verb
    kinds = declared(inspect.signature(verb).parameters.values())

    @functools.wraps(verb)
    def call(**options: Any) -> None:
        verb(**checked(options, kinds))

    call.__dict__["checks_paths"] = True
    return call


def checked(options: Mapping[str, Any], kinds: Mapping[str, Declared]) -> dict[str, Any]:
    """Return a command's options with expanded paths; raises `UsageError` unless all outputs can be written.

    No output may be an input. Paths may begin with ~/, which no shell expands in `--option=~/path`.
    """
    found = dict(options)
    for name, value in options.items():
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, Path) or (name in _PATH_TEXTS and isinstance(first, str)):
            found[name] = _expanded(value)
    _check_names(found)
    check_written(list(_read(found, kinds)), list(_written(found, kinds)))
    return found


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a path that is not text: records and plans, which are JSON, could not name it."""
    for value in options.values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, (str, Path)) and not (text := str(each)).isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise UsageError(f"a path must be text in UTF-8; got {text!a}; rename it") from None


def check_written(read: list[_Named], written: list[tuple[str, Path, Written]]) -> None:
    """Raise `UsageError` for an output that is an input or another output, or that cannot be written."""
    read = [*read, *((KEY, Path(path)) for path in [os.environ.get(KEY)] if path)]
    check_paths(read, [(option, path) for option, path, how in written if how.is_compared])
    for option, path, how in written if first_rank() else ():
        if is_stdout(path):
            continue
        try:
            check_writable(_new_file_of(path) if how.is_folder else path)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); choose another {option}") from None


def _new_file_of(folder: Path) -> Path:
    """Return a path in a folder, or in the folder in which it will be made."""
    above = next((each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()), folder)
    return above / "file"


def declared(parameters: Iterable[inspect.Parameter]) -> dict[str, Declared]:
    """Return the longest name of each parameter's option, and how its path is written."""
    return {each.name: _declared(each.annotation) for each in parameters}


def _declared(annotation: Any) -> Declared:
    metas = get_args(annotation)[1:]
    how = next((each for each in metas if isinstance(each, Written)), None)
    info = next((each for each in metas if isinstance(each, ParameterInfo)), None)
    if isinstance(info, ArgumentInfo):
        return info.metavar or "", how
    # in an annotation the first name is in the place of the default
    names = (getattr(info, "default", None), *(getattr(info, "param_decls", None) or ()))
    return max((each for each in names if isinstance(each, str) and each[:1] == "-"), key=len, default=""), how


def _expanded(value: Any) -> Any:
    return [_expanded(each) for each in value] if isinstance(value, list) else type(value)(os.path.expanduser(value))


def _named(options: Mapping[str, Any], kinds: Mapping[str, Declared]) -> Iterator[tuple[str, str, Any, Written | None]]:
    """Yield the name of each option's parameter, its name on the command line, each of its values, and its mark."""
    for name, value in options.items():
        flag, how = kinds.get(name, ("", None))
        for each in value if isinstance(value, (list, tuple)) else [value]:
            yield name, flag or f"--{name.replace('_', '-')}", each, how


def _read(options: Mapping[str, Any], kinds: Mapping[str, Declared]) -> Iterator[_Named]:
    for name, flag, value, how in _named(options, kinds):
        if name == "model" and isinstance(value, str):
            yield from ((flag, path) for path in _files_of_model(value))
        elif how is None and (isinstance(value, Path) or (name in _PATH_TEXTS and isinstance(value, str))):
            yield flag, Path(value)


def _written(options: Mapping[str, Any], kinds: Mapping[str, Declared]) -> Iterator[tuple[str, Path, Written]]:
    for _, flag, value, how in _named(options, kinds):
        if how is not None and isinstance(value, Path):
            yield flag, value, how


def _files_of_model(model: str) -> Iterator[Path]:
    """Yield the file or folder of a model: after hf: and gguf:, or the module of package.module:function.

    >>> list(_files_of_model("hf:models/gpt2,n_layer=2")), list(_files_of_model("timm:vit_tiny_patch16_224"))
    ([PosixPath('models/gpt2')], [])
    """
    kind, _, name = model.partition(":")
    if kind in {"hf", "gguf"}:
        yield Path(name.partition(",")[0]).expanduser()
    elif kind != "timm":
        module = Path(*kind.split("."))
        for place in sys.path:
            yield from (Path(place) / module.with_suffix(".py"), Path(place) / module / "__init__.py")


# the groups of all options; an option has the same meaning in every command
GROUPS = {
    "Input and output": """
        images labels class-order skip-damaged top logits data test validation prompt file system output
        resume num-images num-rows num-test-rows length json config set write-config
    """,
    "Model": "model weights pretrained seed preprocess runtime device threads training",
    "Stages": """
        stages cut plan replicas devices processes schedule microbatches microbatch-size batch-size slots
        max-length depth work all
    """,
    "Answers": "max-new-tokens temperature top-p top-k speculate",
    "Serving": """
        host port api-keys open allow-origin strict name most-waiting deadline drain max-body certificate
        certificate-key
    """,
    "Aim": "aim target max-drop accuracy-floor target-speedup max-error",
    "Candidates": "rows alternate ratio importance everywhere round-to optimizer-state explain",
    "Measuring": "repeats passes serial-images peer generate one-call train profile",
    "Training": """
        epochs steps optimizer lr lr-schedule weight-decay clip autocast checkpointing teacher hold-out num-workers
        checkpoint-every keep-best
    """,
    "Elastic training": """
        elastic freeze pack replicate cache cache-dir cache-limit cache-dtype cache-views
    """,
    "Several trainings": "compare",
    "Machines": "cluster on on-loss wait-for join costs from-cluster bind key patience",
    "Recording": "trace torch-profiler live track report",
}
_GROUP_OF = {f"--{name}": title for title, names in GROUPS.items() for name in names.split()}
_VALUES = {"int": "N", "float": "X", "str": "TEXT", "list": "TEXT", "path": "PATH"}
_OLD, _NEW = "--policy", "--cut"
_WIDEST = 26  # column of the options


def group_of(option: Any) -> str:
    """Return the title of an option's group; raises `KeyError` if the option is in no group."""
    return _GROUP_OF[max(option.opts, key=len)]


class Verb(TyperCommand):
    """A command whose help has the options in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options; raises `UsageError` for one that is only a setting in a file, with the way to give it."""
        known = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        for word in args:
            option = word.partition("=")[0]
            name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
            if option[:2] == "--" and option not in known and name in getattr(self.callback, "settings", ()):
                raise UsageError(f"{option} is a setting without an option; give --set {name}=VALUE")
            if option == _OLD and _NEW in known:
                raise UsageError(f"{option} has another name: {_NEW} takes policies too, as in {_NEW} equal-blocks")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by group."""
        found: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{title: [] for title in GROUPS}}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None and each.name != "help":
                name, text = _values(record[0]), _without_limits(record[1])
                if each.param_type_name == "argument":
                    found["Arguments"].append((each.metavar or name, text.removesuffix(" [required]")))
                else:
                    found[group_of(each)].append((name, text))
        for title, rows in found.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=_WIDEST)


def _values(text: str) -> str:
    """Shorten the type of an option's value.

    >>> _values("--stages <int range>"), _values("-o, --output <path>")
    ('--stages N', '-o, --output PATH')
    """
    return re.sub(r" <([a-z]+)[^>]*>", lambda found: f" {_VALUES.get(found[1], found[1].upper())}", text)


def _without_limits(text: str) -> str:
    """Remove the limits of a number from an option's help; the error message names them.

    >>> _without_limits("Rows.  [default: 1; x>=1]"), _without_limits("Rows.  [x>=1]")
    ('Rows. [default: 1]', 'Rows.')
    """
    help_text, _, more = text.partition("  [")
    kept = [part for part in more.removesuffix("]").split("; ") if part and not re.search(r"x[<>]", part)]
    return f"{help_text} [{'; '.join(kept)}]" if kept else help_text


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
