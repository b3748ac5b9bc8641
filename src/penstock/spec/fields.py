"""Reading and writing of specs: files, fields of hand-written files, names, and fingerprints."""

import hashlib
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from penstock.errors import ClusterError, PenstockError, UsageError
from penstock.files import write_whole
from penstock.text import nearest, one_line

# advice for a name without a similar known name
RENAME = "; remove or rename it"
_Number = TypeVar("_Number", int, float)


def read_text(what: str, value: object) -> str:
    """Return a field that is text; raises `ClusterError` for anything else."""
    if not isinstance(value, str):
        raise ClusterError(f"{what} must be text; got {value!r}; put it in quotes")
    return value


def read_tables(table: Mapping[str, object], field: str) -> list[Mapping[str, object]]:
    """Return the tables of a field, empty if it is missing; raises `ClusterError` for other values."""
    value = table.get(field, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ClusterError(f"{field} must be [[{field}]] tables; write one [[{field}]] for each")
    return value


def needed(where: str, table: Mapping[str, object], field: str) -> object:
    """Return a field; raises `ClusterError` if it is missing."""
    if field not in table:
        raise ClusterError(f"{field} of {where} not found; add it")
    return table[field]


def check_fields(where: str, table: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise `ClusterError` for an unknown field."""
    for field in table:
        if field not in known:
            advice = nearest(field, known, 1, RENAME)
            raise ClusterError(f"the fields of {where} must be among {', '.join(known)}; got {field!r}{advice}")


def read_quantity(what: str, value: object, parse: Callable[[str], _Number]) -> _Number | None:
    """Return a quantity with its unit, None if missing; raises `ClusterError` for other values."""
    if value is None:
        return None
    try:
        return parse(read_text(what, value))
    except ClusterError:
        raise
    except UsageError as error:
        raise ClusterError(f"{what}: {error}") from None


def read_number(what: str, value: object, kind: type[_Number]) -> _Number:
    """Return a number of type `kind`; raises `ClusterError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ClusterError(f"{what} must be a {'whole ' if kind is int else ''}number; got {value!r}; correct it")
    return kind(value)


# no slash, no space, no leading dot or dash: a name can be neither another folder nor a command's option
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@-]{0,127}", re.ASCII)
NAME_RULE = "be 1 to 128 letters, digits or . _ : + @ - and start with a letter, a digit or _"


def is_name(name: object) -> bool:
    """Return whether this can be the name of a device, a host or a file.

    >>> is_name("board:1"), is_name("pi-4.local"), is_name("../../x"), is_name("two words")
    (True, True, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(what: str, name: object, error: type[PenstockError]) -> None:
    """Raise `error` unless this can be the name of a device, a host or a file."""
    if not is_name(name):
        raise error(f"{what} must {NAME_RULE}; got {repr(name)[:80]}; rename it")


def as_name(text: str) -> str:
    """Make a name from a process's display name: other characters become dashes.

    >>> as_name("worker 1"), as_name("stage 0 on board")
    ('worker-1', 'stage-0-on-board')
    """
    name = re.sub(r"[^A-Za-z0-9._:+@-]+", "-", text).lstrip(".:+@-")[:128]
    return name or "device"


_Spec = TypeVar("_Spec", bound=msgspec.Struct)
_FINGERPRINT_LENGTH = 16


def fingerprint(value: msgspec.Struct | str) -> str:
    """Return a hash of the content of a spec or a text.

    Example:
        plan.profile == fingerprint(profile)

    It is the first 16 hexadecimal digits of the SHA-256 of the text, or of the spec's JSON.
    """
    data = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    return hashlib.sha256(data).hexdigest()[:_FINGERPRINT_LENGTH]


def make_struct(given: Mapping[str, Any], kind: type[_Spec], what: str) -> _Spec:
    """Make a struct from named values; raises `UsageError` with an invalid one, and the words that it may be.

    Example:
        make_struct({"optimizer": "adam"}, FitSettings, "settings of a training run")
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as wrong:
        reason, _, place = str(wrong).partition(" - at ")
        name = place.strip("`").removeprefix("$.").partition("[")[0]
        words = _words(get_type_hints(kind).get(name))
        if words and reason.startswith("Invalid enum value"):
            value = reason.removeprefix("Invalid enum value ")
            raise UsageError(f"{name} must be {' or '.join(words)}; got {value}") from None
        raise UsageError(f"{what} are not valid: {wrong}") from None


def _words(hint: Any) -> list[str]:
    """Return the values of the literals in a type."""
    if get_origin(hint) is Literal:
        return list(map(str, get_args(hint)))
    return [word for part in get_args(hint) for word in _words(part)]


def decode_json(data: bytes, kind: type[_Spec], what: str, error: type[PenstockError]) -> _Spec:
    """Read a spec from JSON; raises `error` with the field and the reason in one line."""
    try:
        return msgspec.json.decode(data.removeprefix(BOM_UTF8), type=kind)
    except msgspec.ValidationError as wrong:
        reason, _, field = str(wrong).partition(" - at ")
        place = field.strip("`").removeprefix("$.") or "its top level"
        raise error(f"{what} is not valid at {place}: {reason}; correct it or make it again") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise error(f"{what} must be JSON ({wrong}); make it again") from None


def decode_toml(text: str | bytes, what: str, error: type[PenstockError]) -> dict[str, Any]:
    """Read tables from TOML; raises `error` in one line."""
    text = text.removeprefix(BOM_UTF8) if isinstance(text, bytes) else text
    try:
        return dict(msgspec.toml.decode(text))
    # a number of thousands of digits is a ValueError; deep nesting a RecursionError
    except (msgspec.DecodeError, ValueError, RecursionError) as wrong:
        raise error(f"{what} must be TOML ({one_line(wrong)}); correct it") from None


def read_bytes(path: str | os.PathLike[str], what: str, error: type[PenstockError]) -> bytes:
    """Read a file; raises `error` if this fails."""
    try:
        return Path(path).read_bytes()
    except OSError as wrong:
        raise error(f"{what} cannot be read from {path} ({wrong.strerror}); give another path") from None


def write_json(path: str | os.PathLike[str], value: msgspec.Struct) -> None:
    """Write a spec as indented JSON; raises `UsageError` if the file cannot be written."""
    data = msgspec.json.format(msgspec.json.encode(value), indent=1)
    write_text(path, data.decode() + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file; raises `UsageError` if this fails."""
    try:
        write_whole(Path(path), text)
    except OSError as wrong:
        raise UsageError(f"{path} cannot be written ({wrong.strerror}); choose another path") from None
