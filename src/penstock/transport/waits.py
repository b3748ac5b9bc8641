"""Waits that may never end, in threads that their callers can give up."""

import queue
import threading
from collections.abc import Callable

_FIRST_LOOK_S, _LOOK_S = 1.0, 60.0


class Waits:
    """Threads that wait for their callers; another one is started if all are waiting.

    Example:
        waits = Waits("penstock-gloo")
        waits.run(work.wait)     # raises what `work.wait` raises, or RuntimeError if another thread calls give_up
        waits.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Waiter] = []
        self._busy: set[_Waiter] = set()
        self._over = False

    def run(self, wait: Callable[[], object], look: Callable[[], object] = lambda: None) -> None:
        """Call `wait` in another thread and return when it has returned; raises its error.

        During a long wait `look` is called, first after a second and then less and less often; an error of it ends this
        call, too.
        """
        with self._lock:
            if self._over:
                raise _given_up()
            waiter = self._idle.pop() if self._idle else _Waiter(self._name)
            self._busy.add(waiter)
        waiter.calls.put(wait)
        error = self._outcome(waiter, look)
        with self._lock:
            given_up = waiter not in self._busy
            self._busy.discard(waiter)
            if not given_up:
                self._idle.append(waiter)
                if self._over:
                    self._end_idle()
        if error is not None:
            raise error

    def _outcome(self, waiter: "_Waiter", look: Callable[[], object]) -> BaseException | None:
        pause_s = _FIRST_LOOK_S
        while True:
            try:
                return waiter.results.get(timeout=pause_s)
            except queue.Empty:
                pause_s = min(2 * pause_s, _LOOK_S)
            try:
                look()
            except Exception as error:
                with self._lock:
                    self._busy.discard(waiter)
                waiter.calls.put(None)
                return error

    def give_up(self) -> None:
        """Raise an error in all calls of `run`, also in later ones; a thread whose wait never ends stays behind."""
        with self._lock:
            for waiter in self._busy:
                waiter.results.put(_given_up())
                waiter.calls.put(None)
            self._busy.clear()
        self.close()

    def close(self) -> None:
        """Refuse further calls, and end the threads that wait for nothing."""
        with self._lock:
            self._over = True
            self._end_idle()

    def _end_idle(self) -> None:
        while self._idle:
            self._idle.pop().calls.put(None)


class _Waiter:
    """A thread that calls what it is given, one after the other, and gives each error, or None."""

    def __init__(self, name: str) -> None:
        self.calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            error: BaseException | None = None
            try:
                call()
            except BaseException as found:  # raised by the caller instead
                error = found
            self.results.put(error)
            del call, error


def _given_up() -> RuntimeError:
    return RuntimeError("it was aborted")
