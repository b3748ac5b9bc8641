"""Blocking calls with a deadline, and a watch function that may raise an error with a better reason."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

_POLL_S = 0.1
# after a failure: time for the watch function to raise the reason
_REASON_S = 6.0

T = TypeVar("T")


class StoreSilent(RuntimeError):  # noqa: N818 -- named after the state
    """A store has not answered in time."""


def run_watched(
    function: Callable[[], T], watch: Callable[[], None], deadline_s: float, *, poll_s: float = _POLL_S
) -> T:
    """Call a blocking function on a separate thread, and meanwhile poll `watch`, which may raise an error.

    Raises the function's error, unless `watch` raises a better reason; and `StoreSilent` if the function has not
    returned by the deadline, when the thread is abandoned.
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
        # the error refers to this frame: a reference cycle through the queue would keep the function's sockets open
        del function, ended
