"""Fields of the TOML files that people write, read with errors that help."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from penstock.errors import ClusterError, UsageError

_Number = TypeVar("_Number", int, float)


def read_text(what: str, value: object) -> str:
    """Return a field that is text; raises `ClusterError` for anything else."""
    if not isinstance(value, str):
        raise ClusterError(f"{what} is text, not {value!r}; put it in quotes")
    return value


def nearest(name: str, known: Collection[str]) -> str:
    """Return what to do about a name that is not known, as the end of an error.

    >>> nearest("bandwith", ["bandwidth", "latency"])
    "; did you mean 'bandwidth'?"
    """
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; remove or rename it"


def read_tables(table: Mapping[str, object], field: str) -> list[Mapping[str, object]]:
    """Return the tables of a field, none where it is not given; raises `ClusterError` for anything else."""
    value = table.get(field, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ClusterError(f"{field} are [[{field}]] tables; write one [[{field}]] for each")
    return value


def needed(where: str, table: Mapping[str, object], field: str) -> object:
    """Return a field; raises `ClusterError` where it is missing."""
    if field not in table:
        raise ClusterError(f"{where} has no {field}; add it")
    return table[field]


def check_fields(where: str, table: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise `ClusterError` for a field that is not known."""
    for field in table:
        if field not in known:
            raise ClusterError(f"{where} has the fields {', '.join(known)}, not {field!r}{nearest(field, known)}")


def read_quantity(what: str, value: object, parse: Callable[[str], _Number]) -> _Number | None:
    """Return a quantity with its unit, None where it is not given; raises `ClusterError` for what is none."""
    if value is None:
        return None
    try:
        return parse(read_text(what, value))
    except ClusterError:
        raise
    except UsageError as error:
        raise ClusterError(f"{what}: {error}") from None


def read_number(what: str, value: object, kind: type[_Number]) -> _Number:
    """Return a number of a kind; raises `ClusterError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ClusterError(f"{what} is a {'whole ' if kind is int else ''}number, not {value!r}; correct it")
    return kind(value)
