"""Paths among the options of a command: read unless declared as `Written`, and checked before the command runs."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from typer.models import ArgumentInfo, ParameterInfo

from penstock.errors import UsageError
from penstock.files import check_paths, check_writable, is_stdout
from penstock.group.launcher import KEY, launcher_variables
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
