"""`penstock keys`: the secret key with which the processes of a run authenticate each other."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.paths import Written
from penstock.terminal.notes import say

app = typer.Typer(no_args_is_help=True, help="Make a key with which the processes of a run authenticate each other.")


@app.callback()
def _keys() -> None:
    """Make a key with which the processes of a run authenticate each other."""


@app.command()
def new(
    path: Annotated[
        Path, Written(), typer.Argument(metavar="FILE", help="File of the key, readable only by this account.")
    ],
) -> None:
    """Write a new key; keep it secret, and pass it to every process of a run by --key or PENSTOCK_KEY."""
    from penstock.transport.curve import write_key

    write_key(path)
    say(f"{path}: a new key; give it to every process of a run with PENSTOCK_KEY={path}")
