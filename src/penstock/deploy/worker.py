"""A worker process, which joins, runs jobs in sequence and leaves; it has no model of its own."""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.deploy.jobs import DoMore, MakeRuntime, RunBaseline, read_stages, receive_job, serve_baseline
from penstock.deploy.state import Holdings
from penstock.engine.executor import OwnStages
from penstock.engine.job import StagesJob
from penstock.engine.tracers import follow_stages
from penstock.errors import PenstockError, ProgramError, TransportError
from penstock.group.entry import join_local
from penstock.group.launcher import leave_with_parent
from penstock.group.regroup import renew
from penstock.group.world import Leave, World
from penstock.resources import share_arena
from penstock.runtime.torch_settings import applied
from penstock.transport.base import send_bytes
from penstock.wire import FEEDER

# folder of the bundle parts for workers started by a process on this machine
BUNDLE = "PENSTOCK_BUNDLE"
# called with a document's settings; returns an answer that JSON can hold
Job = Callable[[World, Mapping[str, Any]], Any]
# adds arguments to a worker's command line, and returns a function from parsed arguments to jobs
Prepare = Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace], Mapping[str, Job]]]


def work(
    world: World,
    make: MakeRuntime | None = None,
    bundle: Path | None = None,
    more: Mapping[str, Job] | None = None,
    holdings: Holdings | None = None,
) -> Leave:
    """Run jobs until the driver sends `Leave`, and return it. Errors are reported to the whole world, then raised.

    `more` are additional jobs, by name, that this process was started with.
    """
    with world.explained():
        while not isinstance(document := receive_job(world.transport), Leave):
            if isinstance(document, DoMore):
                answer = _find_job(more or {}, document.name)(world, document.settings)
                send_bytes(world.transport, json.dumps(answer).encode(), FEEDER)
            else:
                do_job(world, document, make, bundle, holdings)
        with contextlib.suppress(TransportError):  # the work is done, even if the driver is lost
            send_bytes(world.transport, b"left", FEEDER)
        world.health.close()  # from here on the exit of a process is not a failure
        return document


def follow(
    world: World, more: Mapping[str, Job] | None = None, make: MakeRuntime | None = None, bundle: Path | None = None
) -> str:
    """Run jobs until the driver sends `Leave`, across successive groups; return the driver's message.

    If a rank is lost, the run may form another group without that rank: see `group/regroup.py`.
    """
    holdings = Holdings()
    while True:
        try:
            with world:
                leave = work(world, make, bundle, more, holdings)
        except PenstockError:
            if not renew(world):
                raise
        else:
            if not leave.again or not renew(world):
                return leave.message


def _find_job(more: Mapping[str, Job], name: str) -> Job:
    if name not in more:
        raise ProgramError(
            f"this worker was started without the job {name[:40]!r}; start every process with the same command"
        )
    return more[name]


def do_job(
    world: World,
    document: StagesJob | RunBaseline,
    make: MakeRuntime | None = None,
    bundle: Path | None = None,
    holdings: Holdings | None = None,
) -> None:
    """Run one job: a model alone, or stages until they are closed."""
    if isinstance(document, RunBaseline):
        serve_baseline(world, document)
        return
    with applied(document.torch_settings):
        own = OwnStages(world, document, *read_stages(world, document, make, bundle, holdings))
        torch.set_num_threads(document.threads)
        own.serve(follow_stages(own))


def _nothing(_parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], Mapping[str, Job]]:
    return lambda _given: {}


def main(prepare: Prepare = _nothing) -> int:
    """Run a worker started by a process on this machine.

    `prepare` adds jobs, which depend only on this process's own command line.
    """
    share_arena()
    parser = argparse.ArgumentParser()
    more = prepare(parser)
    for name in ("port", "rank", "size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a clean exit is announced by a job; allow time for it before treating the closed pipe as a failure
    leave_with_parent(grace_s=3.0)
    folder = os.environ.get(BUNDLE)
    try:
        world = join_local(given.port, given.rank, given.size)
        follow(world, more(given), bundle=Path(folder) if folder else None)
    except PenstockError:
        return 1  # already reported to the driver, which prints it
    return 0


if __name__ == "__main__":
    sys.exit(main())
