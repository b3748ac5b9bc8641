"""Background regrouping: a process joins its run's newest group while its program continues."""

import threading

from penstock.errors import DeviceLost, PenstockError, RunError
from penstock.group.regroup import next_group, regroup, release
from penstock.group.world import World
from penstock.text import first_line
from penstock.wire import FEEDER


class Following:
    """A background thread that forms the next group after a failure that the run survives.

    When a group fails, the program may be computing, loading data or writing a file. The next group forms meanwhile,
    without waiting for the program, which gets it from `newest`.

        verdict ──▶ abort connections ──▶ roll call, rendezvous (`group/regroup.py`) ──▶ newest

    Example:
        following = Following(world)
        ...                            # receiving a message failed with `error`
        world = following.newest(error)
    """

    def __init__(self, world: World) -> None:
        self._world = world  # the newest group
        self._problem: PenstockError | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        world.health.when_failed(self._ended)

    def newest(self, error: PenstockError) -> World:
        """Wait until the group after the one in which `error` occurred has formed, and return it.

        Raises `error` if the run forms no further group, or the error that prevented the next group from forming.
        """
        with self._changed:
            self._changed.wait_for(self._is_settled)
            if self._problem is not None:
                raise self._problem from error
            if self._world.health.failure is not None:
                raise error
            return self._world

    def close(self) -> None:
        """Form no further group."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _is_settled(self) -> bool:
        """Return whether no further group is forming or due after the newest one."""
        if self._thread is not None:
            return False
        return self._problem is not None or self._closed or not outlives(self._world)

    def _ended(self) -> None:
        """Start forming the next group after the verdict on a group, if the run survives."""
        with self._changed:
            if self._closed or self._thread is not None or not outlives(self._world):
                return
            self._thread = threading.Thread(target=self._form, name="penstock-following", daemon=True)
            self._thread.start()

    def _form(self) -> None:
        """Form the next group; if it has failed by then and the run survives that, form another."""
        while True:
            try:
                following = _next_group(self._world)
            # any error at all: callers of `newest` wait for this thread
            except BaseException as error:
                with self._changed:
                    self._problem, self._thread = _as_ours(error), None
                    self._changed.notify_all()
                return
            with self._changed:
                self._world = following
            following.health.when_failed(self._ended)
            with self._changed:
                if self._closed or not outlives(following):
                    self._thread = None
                    self._changed.notify_all()
                    return


def outlives(world: World) -> bool:
    """Return whether the run continues after the verdict on a group, with this process in it."""
    failure = world.health.failure
    if failure is None or world.membership is None:
        return False
    return failure.again or ((failure.lost or failure.memory) and failure.rank not in {FEEDER, world.rank})


def _as_ours(error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    ours = RunError(
        f"the next group of processes did not form: {type(error).__name__}: {first_line(error)}; start again from the "
        "last checkpoint"
    )
    ours.__cause__ = error
    return ours


def _next_group(world: World) -> World:
    """Return the group after one that has failed; raises `DeviceLost` if this process is in none."""
    failure = world.health.failure
    if failure is None:
        raise DeviceLost("a regroup was requested without a failure; continue with the current group")
    if world.rank == FEEDER:
        return regroup(world, set() if failure.again else {failure.rank}, admits=failure.again)
    release(world.transport.inner, world.health)
    if (following := next_group(world, waits=False)) is None:
        raise DeviceLost(
            f"{failure.message}, and this process was not admitted to another group; if the others continued, start it "
            "again to join them"
        )
    return following
