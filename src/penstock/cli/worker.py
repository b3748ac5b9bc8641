"""`penstock worker`: a process that joins a run started on another machine."""

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options as opt
from penstock.errors import RunError
from penstock.terminal.notes import say


def worker(
    join: Annotated[
        str, typer.Option("--join", metavar="HOST:PORT", help="First host of the run, as printed at its start.")
    ],
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the run to start.")] = 120.0,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Key file of the run. Default: PENSTOCK_KEY.")
    ] = None,
    bind: opt.Bind = None,
) -> None:
    """Join a running job as a returning or new device; exit when the job ends."""
    from penstock.deploy.worker import follow
    from penstock.group.launched import KEY
    from penstock.group.regroup import join_later, read_place

    host, port = read_place(join)
    opt.bind_to(bind)
    if key is not None:
        os.environ[KEY] = str(key)
    world = join_later(host, port, patience)
    if world is None:
        raise RunError(f"the run at {join} ended before it admitted this process; join the next one")
    say(f"admitted to the run at {join}")
    say(follow(world) or "the run is over")
