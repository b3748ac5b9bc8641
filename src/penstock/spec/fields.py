"""Fields of the TOML files that people write, read with errors that help."""

import difflib
from collections.abc import Collection

from penstock.errors import ClusterError


def read_text(what: str, value: object) -> str:
    """Return a field that is text; raises `ClusterError` for anything else."""
    if not isinstance(value, str):
        raise ClusterError(f"{what} is text, not {value!r}; put it in quotes")
    return value


def nearest(name: str, known: Collection[str]) -> str:
    """Say what to do about a name that is not known, as the end of an error.

    >>> nearest("bandwith", ["bandwidth", "latency"])
    "; did you mean 'bandwidth'?"
    """
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; remove or rename it"
