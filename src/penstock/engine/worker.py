"""A worker process: it joins, does one job after the other, and leaves. It knows no model."""

import argparse
import os
import signal
import sys
import threading

import torch

from penstock.engine.executor import serve
from penstock.engine.jobs import build_slots, do_alone, read_stages, receive_job
from penstock.engine.world import World, join_local
from penstock.errors import PenstockError, TransportError
from penstock.plan.schedule import forward_only


def work(world: World) -> None:
    """Do jobs until told to leave; what goes wrong is reported to the whole world, then raised."""
    try:
        while do_job(world):
            pass
    except TransportError as error:
        raise world.explain(error) from error
    except Exception as error:
        world.health.report(error)
        raise


def do_job(world: World) -> bool:
    """Wait for a job and do it; False when it was the order to leave."""
    document = receive_job(world.transport)
    if document["kind"] == "leave":
        return False
    if document["kind"] == "alone":
        do_alone(world.transport, document)
        return True
    job, runtimes = read_stages(world.transport, document)
    torch.set_num_threads(job.threads)
    slots, _ = build_slots(world.transport, job, runtimes)
    serve(slots, lambda: forward_only(sorted(slots)))
    return True


def main() -> int:
    """Run a worker that a process on this machine started."""
    parser = argparse.ArgumentParser()
    for name in ("port", "rank", "size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name="penstock-parent", daemon=True).start()
    world = join_local(given.port, given.rank, given.size)
    try:
        work(world)
    except PenstockError:
        return 1  # the feeding process has been told and prints it
    finally:
        world.close()
    return 0


def _leave_with_parent() -> None:
    """The pipe on standard input closes when the parent is gone, however it went."""
    sys.stdin.buffer.read()
    # a clean end comes as a job; give it a moment before taking the closed pipe for a death
    threading.Event().wait(3.0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
