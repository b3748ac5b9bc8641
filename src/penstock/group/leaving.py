"""What becomes of a pipeline that nobody closes: one that a script has dropped, or leaves open when it ends."""

import os
import sys
import threading
import weakref
from typing import Protocol

from penstock.group.world import World


class Streams(Protocol):
    """Stages in place: a `Deployment`, or `Replicas` of one."""

    def abandon(self) -> None:
        """End at once, whatever is under way."""


def end_when_dropped(owner: object, world: World, stages: Streams) -> "weakref.finalize[..., object]":
    """End the workers of a world once nothing refers to its owner any more, or when the program ends.

    Whoever closes the owner in order calls `detach()` on what this returns.
    """
    return weakref.finalize(owner, _end, world, stages, os.getpid())


def failed() -> BaseException | None:
    """Return the exception that ends this program, or None where it ends by itself."""
    problem: BaseException | None = getattr(sys, "last_value", None)
    return problem


def _end(world: World, stages: Streams, process: int) -> None:
    if os.getpid() != process:
        return  # a fork of the process that has them: their connections are its own

    def end() -> None:
        stages.abandon()
        world.transport.abort()
        world.close(0.0)  # workers that nobody feeds any more have nothing to finish

    if threading.main_thread().is_alive():
        # garbage is collected on any thread, also on one that this would wait for
        threading.Thread(target=end, name="penstock-drop", daemon=True).start()
    else:  # the program ends, and from Python 3.12 on it starts no thread then
        end()
