"""Command-line options made from the fields of a struct, which declares their name, type, default and help.

A field's help is the description of its `msgspec.Meta`. The meta's `extra` has additional values for the command line:
`flags` if they differ from the field's name (empty for `--name` and `--no-name`), `metavar`, `min` if the struct has no
limit, `default` if the option's default differs, `argument` as the metavar of an argument, `path` if a text is a path,
`written` if it is a `file`, a `folder`, or a `kept folder`, whose files are always the command's own. A struct's `rare`
fields have no option (see `cli/config.py`)."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import typer

from penstock.cli.paths import Written
from penstock.errors import UsageError
from penstock.spec.fields import make_struct

Given = dict[str, Any]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
IN_FILE = "penstock.in_file"  # in a context's `meta`: names of the parameters given in a file of settings


def takes_settings(
    struct: type[msgspec.Struct], shared: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add to a command an option for each field of a struct that has a description or an entry in `shared`.

    The function's parameter `given` receives the values by field name, ready for the struct.

    Example:
        @takes_settings(CompressSettings, {"model": Model})
        def compress(*, given: Given, json: JsonFile = None) -> None: ...
    """
    parameters = list(_parameters(struct, shared or {}, getattr(struct, "rare", ())))
    fields = list(fields_of(struct))
    paths = {name: extra["path"] for name, _, extra in fields if "path" in extra}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def call(**options: Any) -> None:
            given = {name: options.pop(name) for name, _, _ in fields if name in options}
            for name, kind in paths.items():
                if given.get(name) is not None:
                    given[name] = str(given[name].resolve() if kind == "whole" else given[name])
            verb(given=given, **options)

        own = list(inspect.signature(verb).parameters.values())
        place = [each.name for each in own].index("given")
        own[place : place + 1] = parameters
        call.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        call.__annotations__ = {}
        return call

    return decorate


def settings_of(struct: type[_Struct], given: Given) -> _Struct:
    """Make a struct of the values given; raises `UsageError` for missing ones and for wrong ones."""
    needed = {field.name for field in msgspec.structs.fields(struct) if field.required}
    missing = [
        extra.get("argument", f"--{name}")
        for name, _, extra in fields_of(struct)
        if name in needed and given.get(name) is None
    ]
    if missing:
        raise UsageError(f"{' and '.join(missing)} must be given, on the command line or in a file for --config")
    return make_struct({name: value for name, value in given.items() if value is not None}, struct, "the settings")


def named_options(context: typer.Context) -> set[str]:
    """Return the names of the parameters given on the command line, in the environment, or in a file of settings."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    named = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    in_file: set[str] = context.meta.get(IN_FILE, set())
    return named | in_file


def _parameters(
    struct: type[msgspec.Struct], shared: Mapping[str, Any], rare: Collection[str]
) -> Iterator[inspect.Parameter]:
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    for name, base, extra in fields_of(struct):
        if (name not in shared and "description" not in extra) or name in rare:
            continue
        default = fields[name].default
        if fields[name].required:
            default = inspect.Parameter.empty
        elif default is msgspec.NODEFAULT:
            default = None  # a list, empty by default
        default = extra.get("default", default)
        if "path" in extra and isinstance(default, str):
            default = Path(default)
        annotation = shared[name] if name in shared else _option(name, base, default, extra)
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(name: str, base: Any, default: Any, extra: Mapping[str, Any]) -> Any:
    if "argument" in extra:
        return Annotated[base | None, typer.Argument(metavar=extra["argument"], help=extra["description"])]
    limits = {"min": extra["ge"]} if base is int and "ge" in extra else {}
    limits |= {"min": extra["min"]} if "min" in extra else {}
    if "path" in extra:
        base = Path
    elif get_origin(base) is Literal:
        base = str  # the struct checks the values
    elif get_origin(base) is list:
        base = list[str]
    flags = extra.get("flags", [f"--{name.replace('_', '-')}"])
    how = typer.Option(*flags, help=extra["description"], metavar=extra.get("metavar"), **limits)
    kind = base | None if default is None else base
    written = written_as(extra)
    return Annotated[kind, how] if written is None else Annotated[kind, written, how]


def written_as(extra: Mapping[str, Any]) -> Written | None:
    """Return how a field's path is written; None if it is read, or no path."""
    how = extra.get("written")
    return None if how is None else Written(is_folder=how != "file", is_compared=how != "kept folder")


def fields_of(struct: type[msgspec.Struct]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each field's name, its type without None and metas, and the values of the metas."""
    hints = get_type_hints(struct, include_extras=True)
    # the struct's own fields first, then inherited ones
    for name in sorted(struct.__struct_fields__, key=lambda name: name not in struct.__annotations__):
        base = hints[name]
        extra: dict[str, Any] = {}
        while get_origin(base) is Annotated or NoneType in get_args(base):
            if get_origin(base) is Annotated:
                base, *metas = get_args(base)
                for meta in metas:
                    said = {"description": meta.description, "ge": meta.ge}
                    extra |= {key: value for key, value in said.items() if value is not None} | (meta.extra or {})
            else:
                base = next(each for each in get_args(base) if each is not NoneType)
        yield name, base, extra
