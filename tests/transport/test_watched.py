"""A blocking call on a thread of its own: its error, a better reason, and what an abandoned one leaves."""

import gc
import threading
import weakref

import pytest

from penstock.errors import RunError
from penstock.transport.watched import run_watched
from tests.cluster.labs import until


class Held:
    """Something with a descriptor, such as a listening socket."""


def test_what_an_abandoned_call_held_is_released_without_a_collection() -> None:
    held, goes_on = Held(), threading.Event()
    still_there = weakref.ref(held)

    def connect(held: Held = held) -> None:
        goes_on.wait(10)
        raise RuntimeError(f"{held} has no peer")

    def watch() -> None:
        raise RunError("worker 1 is gone")

    gc.disable()
    try:
        try:
            run_watched(connect, watch, 10.0)
        except RunError:  # pytest.raises would hold the frames
            pass
        else:
            pytest.fail("the reason was not raised")
        del held, connect
        goes_on.set()
        until(lambda: still_there() is None)
    finally:
        gc.enable()
