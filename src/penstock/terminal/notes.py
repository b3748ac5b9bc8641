"""What a person should know although nothing failed: one line on standard error."""

import sys

from penstock.terminal.plain import plain


def note(text: str) -> None:
    """Write one line to standard error."""
    print(f"note: {plain(text)}", file=sys.stderr, flush=True)
