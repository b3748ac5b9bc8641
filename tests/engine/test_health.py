"""Liveness over a store in memory; real processes that stop are in test_mishaps."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from penstock.engine.health import Health
from penstock.errors import DeviceLost, OutOfMemory, RunError

NAMES = ["feeder", "host1", "host2"]


class Group:
    """Three processes' healths in one."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.failed = [threading.Event() for _ in NAMES]
        self.healths = [self.join(rank) for rank in range(len(NAMES))]

    def join(self, rank: int) -> Health:
        store = PrefixStore("x", self.store)
        return Health(store, rank, NAMES, self.failed[rank].set, silence_s=0.3, beat_s=0.02)

    def fall_silent(self, rank: int) -> None:
        """As a stopped process does: no beat any more, and no word."""
        self.healths[rank]._stop.set()
        self.healths[rank]._thread.join()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for health in made.healths:
        health.close()


def test_all_well(group: Group) -> None:
    time.sleep(0.5)
    for health in group.healths:
        health.check()
        assert health.watching
    assert not any(failed.is_set() for failed in group.failed)


def test_silence_is_noticed_by_the_others_and_named(group: Group) -> None:
    time.sleep(0.1)
    group.fall_silent(2)
    begin = time.perf_counter()
    for rank in (0, 1):
        assert group.failed[rank].wait(2.0)
        with pytest.raises(DeviceLost, match="host2 has not answered for 0 s: it was stopped"):
            group.healths[rank].check()
    assert time.perf_counter() - begin < 1.0
    assert not group.failed[2].is_set()


def test_a_goodbye_is_not_a_failure(group: Group) -> None:
    time.sleep(0.1)
    group.healths[2].close()
    time.sleep(0.6)
    group.healths[0].check()
    group.healths[1].check()


def test_one_report_reaches_everybody_and_the_first_counts(group: Group) -> None:
    group.healths[1].report(ValueError("no more paper\nsecond line"))
    group.healths[2].report(ValueError("too late"))
    for rank, failed in enumerate(group.failed):
        assert failed.wait(2.0)
        with pytest.raises(RunError, match=r"^host1: no more paper$"):
            group.healths[rank].check()
    assert not isinstance(group.healths[0].failure, DeviceLost)


def test_running_out_of_memory_stays_what_it_is(group: Group) -> None:
    group.healths[1].report(MemoryError())
    for rank, failed in enumerate(group.failed):
        assert failed.wait(2.0)
        with pytest.raises(OutOfMemory, match=r"^host1: MemoryError$"):
            group.healths[rank].check()


def test_wait_for_failure_has_a_deadline(group: Group) -> None:
    begin = time.perf_counter()
    group.healths[0].wait_for_failure(0.2)
    assert 0.2 <= time.perf_counter() - begin < 1.0


def test_a_process_that_never_beat_is_missed_too() -> None:
    store = HashStore()
    failed = threading.Event()
    health = Health(PrefixStore("x", store), 0, NAMES[:2], failed.set, silence_s=0.05, beat_s=0.02)
    try:
        assert failed.wait(2.0)
        with pytest.raises(DeviceLost, match="host1"):
            health.check()
    finally:
        health.close()


def test_a_store_that_breaks_is_the_first_process_gone() -> None:
    second = timedelta(seconds=1)
    server = TCPStore("127.0.0.1", 0, None, True, second, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, second, wait_for_workers=False)
    failed = threading.Event()
    health = Health(client, 1, NAMES[:2], failed.set, beat_s=0.02)
    time.sleep(0.1)
    del server
    try:
        assert failed.wait(5.0)
        with pytest.raises(DeviceLost, match="feeder does not answer: the store is gone"):
            health.check()
    finally:
        health.close()


def test_statuses_travel_with_the_beats(group: Group) -> None:
    group.healths[1].status = lambda: '[0, "a b"]'
    deadline = time.monotonic() + 2.0
    while '[0, "a b"]' not in group.healths[0].statuses() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert '[0, "a b"]' in group.healths[0].statuses()
    assert group.healths[1].statuses()[0] == '[0, "a b"]'
