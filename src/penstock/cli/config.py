"""Options in a file: `--config run.toml`, `--set key=value`, and `--write-config`, which prints such a file."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import typer
from typer.models import ParameterInfo

from penstock.cli.help import GROUPS
from penstock.cli.paths import checked, declared
from penstock.cli.settings_options import IN_FILE, fields_of, named_options, takes_settings, written_as
from penstock.errors import UsageError
from penstock.spec.fields import decode_toml, read_bytes
from penstock.terminal.notes import say
from penstock.text import nearest, one_line

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
