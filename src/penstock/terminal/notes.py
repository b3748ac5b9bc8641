"""Lines for people: what is printed goes through here or `console.py`, so that no name commands a terminal."""

import sys

from penstock.text import plain


def say(text: str, *, err: bool = False) -> None:
    """Print text, in one or more lines."""
    print(plain(text, lines=True), file=sys.stderr if err else sys.stdout, flush=True)


def note(text: str) -> None:
    """Print a line that a person should know although nothing failed, to standard error."""
    say(f"note: {plain(text)}", err=True)
