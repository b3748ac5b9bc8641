"""Blocking calls with a deadline and a watch function that may report a better reason."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

_POLL_S = 0.1
# after a failure: timeout for the watch function to raise the reason
_REASON_S = 6.0

T = TypeVar("T")


class StoreSilent(RuntimeError):  # noqa: N818 -- named after the state
    """A store has not answered in time."""


def run_watched(
    function: Callable[[], T], watch: Callable[[], None], deadline_s: float, *, poll_s: float = _POLL_S
) -> T:
    """Call a blocking function on a separate thread, and poll `watch`, which may raise sooner.

    Raises the function's error, unless `watch` raises a better reason, and `StoreSilent` if it has not returned by
    the deadline; the thread is then abandoned.
    """
    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    ends_s = time.monotonic() + deadline_s

    threading.Thread(target=_run, args=(function, ended), name="penstock-connect", daemon=True).start()
    while True:
        try:
            result, error = ended.get(timeout=poll_s)
        except queue.Empty:
            watch()
            if time.monotonic() > ends_s:
                raise StoreSilent(f"no answer for {deadline_s:g} s") from None
            continue
        if error is not None:
            deadline = time.monotonic() + _REASON_S
            while isinstance(error, RuntimeError) and time.monotonic() < deadline:
                watch()
                time.sleep(poll_s)
            raise error
        found: T = result
        return found


def _run(function: Callable[[], Any], ended: "queue.SimpleQueue[tuple[Any, BaseException | None]]") -> None:
    try:
        ended.put((function(), None))
    except BaseException as error:
        ended.put((None, error))
    finally:
        # the error has this frame: in a cycle through the queue, sockets of the function would stay open for a while
        del function, ended
