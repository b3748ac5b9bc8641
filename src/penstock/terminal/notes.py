"""Printing of lines: everything is printed here or in `console.py`, so that names cannot control the terminal."""

import sys

from penstock.text import plain


def say(text: str, *, err: bool = False) -> None:
    """Print text, in one or more lines."""
    print(plain(text, lines=True), file=sys.stderr if err else sys.stdout, flush=True)


def note(text: str) -> None:
    """Print an informational line to standard error."""
    say(f"note: {plain(text)}", err=True)
