"""Waits in threads of their own: results, errors, and waits that are given up."""

import threading
import time

import pytest

from penstock.transport.waits import Waits


def test_it_returns_when_the_wait_returns_and_raises_its_error() -> None:
    waits, done = Waits("waits"), []
    waits.run(lambda: done.append(1))
    with pytest.raises(KeyError, match="gone"):
        waits.run(lambda: dict[str, int]()["gone"])
    waits.run(lambda: done.append(2))
    assert done == [1, 2]
    assert sum(thread.name == "waits" for thread in threading.enumerate()) == 1
    waits.close()


def test_a_look_that_fails_ends_a_wait_and_one_that_does_not_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transport.waits._FIRST_LOOK_S", 0.01)
    waits, ends, looks = Waits("waits"), threading.Event(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise OSError("closed")

    with pytest.raises(OSError, match="closed"):
        waits.run(ends.wait, look)
    ends.set()
    waits.run(lambda: looks.append(1))
    assert len(looks) == 4
    waits.close()


def test_calls_at_once_have_a_thread_each() -> None:
    waits, all_there = Waits("waits"), threading.Barrier(3, timeout=10)
    callers = [threading.Thread(target=waits.run, args=(all_there.wait,)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)
    assert not any(caller.is_alive() for caller in callers)
    waits.close()


@pytest.mark.parametrize("by", ["give_up", "close"])
def test_a_wait_that_was_given_up_raises_and_one_that_was_not_goes_on(by: str) -> None:
    waits, never, raised = Waits("waits"), threading.Event(), []

    def call() -> None:
        try:
            waits.run(never.wait)
        except RuntimeError as error:
            raised.append(error)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    while sum(thread.name == "waits" for thread in threading.enumerate()) < 2:
        time.sleep(0.01)
    getattr(waits, by)()
    for caller in callers:
        caller.join(0.5 if by == "close" else 10)
    assert len(raised) == (2 if by == "give_up" else 0)
    with pytest.raises(RuntimeError):
        waits.run(lambda: None)
    never.set()
    for caller in callers:
        caller.join(10)
    assert not any(caller.is_alive() for caller in callers)
