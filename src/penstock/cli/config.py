"""Options of a verb, from the fields of its settings and in a file: `--config run.toml`, `--set`, `--write-config`."""

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import typer
from typer.models import ParameterInfo

from penstock.cli.options import GROUPS, Written, checked, declared
from penstock.errors import UsageError
from penstock.spec.fields import decode_toml, make_struct, read_bytes
from penstock.text import nearest, one_line, say

_OTHER_GROUPS = {"cuts": "cut"}  # settings whose option has another name
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "config": (
        None,
        Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file of settings, or a run's settings.json.")],
    ),
    "set": (
        None,
        Annotated[
            list[str] | None,
            typer.Option(metavar="KEY=VALUE", help="A setting, also one without an option; may be repeated."),
        ],
    ),
    "write_config": (
        False,
        Annotated[bool, typer.Option("--write-config", help="Print all settings, as a file for --config.")],
    ),
}
_CONTEXT = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
Given = dict[str, Any]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
IN_FILE = "penstock.in_file"  # in a context's `meta`: names of the parameters given in a file of settings


def takes_config(struct: type[msgspec.Struct]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add to a command what `takes_settings` adds, and the options that give values of the struct in a file.

    Options on the command line come before `--set`, and `--set` before the file. Paths in the file are relative to the
    current folder. Raises `UsageError` for a wrong key or value.

    Example:
        @takes_config(ChatSettings)
        def chat(*, given: Given) -> None: ...
    """

    def decorate(bare: Callable[..., None]) -> Callable[..., None]:
        verb = takes_settings(struct)(bare)
        own = list(inspect.signature(verb).parameters.values())
        takes_context = own[0].name == "context"
        own[:1] = own[:1] if takes_context else [_CONTEXT, *own[:1]]
        fields = {name: (base, extra) for name, base, extra in fields_of(struct)}
        kinds = declared(own)
        for name, (_, extra) in fields.items():
            kinds.setdefault(name, (f"--set {name}", written_as(extra)))

        @functools.wraps(verb)
        def call(context: typer.Context, config: Path | None, write_config: bool, **options: Any) -> None:
            pairs = options.pop("set") or []
            values = _typed(read_config(config) | dict(_read_pair(pair, fields) for pair in pairs), struct)
            named = named_options(context)
            for name, value in values.items():
                if name not in named:
                    is_path = isinstance(value, str) and "path" in fields[name][1]
                    options[name] = Path(value) if is_path else value
            context.meta[IN_FILE] = set(values)
            if write_config:
                say(_text(struct, own, {name: options[name] for name in named_options(context) if name in fields}))
                return
            found = checked(options | {"config": config}, kinds | {"config": ("--config", None)})
            del found["config"]
            verb(**found | ({"context": context} if takes_context else {}))

        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (default, annotation) in _OPTIONS.items()
        ]
        call.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        call.__annotations__ = {}
        call.__dict__ |= {"checks_paths": True, "settings": frozenset(fields)}
        return call

    return decorate


def read_config(path: Path | None) -> dict[str, Any]:
    """Read a file's values; those of a run's settings.json that are null are left out."""
    if path is None:
        return {}
    data, what = read_bytes(path, "settings", UsageError), f"settings in {path}"
    if path.suffix != ".json":
        return decode_toml(data, what, UsageError)
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise UsageError(f"{what} must be a JSON object ({one_line(wrong)}); correct it") from None
    return {name: value for name, value in found.items() if value is not None}


def _read_pair(pair: str, fields: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> tuple[str, Any]:
    """Read `key=value`, whose value is TOML, or text that needs no quotes.

    >>> _read_pair("clip=1.5", {}), _read_pair("lr-schedule=cosine", {}), _read_pair("elastic=true", {})
    (('clip', 1.5), ('lr_schedule', 'cosine'), ('elastic', True))
    """
    name, equals, text = pair.partition("=")
    if not equals:
        raise UsageError(f"--set must be KEY=VALUE; got {pair!r}; write one --set for each")
    name = name.strip().replace("-", "_")
    if fields.get(name, (None,))[0] is not str:
        try:
            return name, decode_toml(f"value = {text}", "", UsageError)["value"]
        except UsageError:
            pass
    return name, text


def _typed(values: Mapping[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the values as the struct's fields have them; raises `UsageError` for an unknown key or a wrong value."""
    hints, known = get_type_hints(struct, include_extras=True), struct.__struct_fields__
    found = {}
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"{name!r} is no setting{nearest(name, known, 1, '; see --write-config')}")
        try:
            found[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError as wrong:
            raise UsageError(f"the setting {name} is not valid ({wrong}); got {value!r}") from None
    return found


def _text(struct: type[msgspec.Struct], parameters: list[inspect.Parameter], given: Mapping[str, Any]) -> str:
    """Write a file with every setting: given ones, and the others' defaults as comments."""
    options = {each.name: each for each in parameters}
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    place = {name: number for number, name in enumerate(" ".join(GROUPS.values()).replace("-", "_").split())}
    titles = {name: title for title, names in GROUPS.items() for name in names.replace("-", "_").split()}
    rows: list[tuple[int, str, str]] = []
    for name, _, extra in fields_of(struct):
        group = name if name in place else _OTHER_GROUPS.get(name, "")
        annotation = options[name].annotation if name in options else None
        info = next((each for each in get_args(annotation) if isinstance(each, ParameterInfo)), None)
        about = extra.get("description") or (info.help if info is not None else None)
        if group in place and about:
            default = options[name].default if name in options else defaults[name]
            shown = f"{name} = {_value(given[name])}" if name in given else f"# {name} = {_value(default)}"
            rows.append((place[group], titles[group], f"# {about}\n{shown.rstrip()}"))
    lines, title = [], ""
    for _, own, row in sorted(rows):
        lines += [f"\n# {own}\n"] if own != title else []
        title = own
        lines.append(row)
    return "\n".join(lines).strip()


def _value(value: Any) -> str:
    """Write a value as TOML; empty for None.

    >>> _value(True), _value(0.1), _value("a b"), _value(["x"]), _value(None)
    ('true', '0.1', '"a b"', '["x"]', '')
    """
    if value is None:
        return ""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value if isinstance(value, (bool, int, float)) else str(value), ensure_ascii=False)


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
