"""`penstock worker`: a process that computes for a run which another one has begun."""

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options as opt
from penstock.errors import RunError
from penstock.terminal.notes import say


def worker(
    join: Annotated[
        str, typer.Option("--join", metavar="HOST:PORT", help="The run's first host, as it says when it begins.")
    ],
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the run to begin.")] = 120.0,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's key; PENSTOCK_KEY names it where not given.")
    ] = None,
    bind: opt.Bind = None,
) -> None:
    """Join a run that is under way, as a device that comes back or a new one; leave when it is over."""
    from penstock.deploy.worker import follow
    from penstock.group.regroup import join_later, read_place
    from penstock.group.variables import KEY

    host, port = read_place(join)
    opt.bind_to(bind)
    if key is not None:
        os.environ[KEY] = str(key)
    world = join_later(host, port, patience)
    if world is None:
        raise RunError(f"the run at {join} ended before it took this process in; join the next one")
    say(f"taken in by the run at {join}")
    say(follow(world) or "the run is over")
