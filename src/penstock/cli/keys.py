"""`penstock keys`: the secret by which the processes of a run know each other."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.terminal.notes import say

app = typer.Typer(no_args_is_help=True, help="Make a key by which the processes of a run know each other.")


@app.callback()
def _keys() -> None:
    """Make a key by which the processes of a run know each other."""


@app.command()
def new(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The key's file, which only this account reads.")],
) -> None:
    """Write a new key: give it to every process of a run by --key or PENSTOCK_KEY, and keep it to yourself."""
    from penstock.transport.curve import write_key

    write_key(path)
    say(f"{path}: a new key; give it to every process of a run with PENSTOCK_KEY={path}")
