"""Liveness over a store in memory; real processes that stop are in test_mishaps."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock.errors import DeviceLost, OutOfMemory, RunError
from penstock.group.board import connect_store, prepare_board, serve_store
from penstock.group.liveness import Boards, Health
from tests.fewer import long

LOOPBACK = "127.0.0.1"
NAMES = ["feeder", "host1", "host2"]


class Group:
    """Three processes' healths in one."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.failed = [threading.Event() for _ in NAMES]
        self.healths = [self.join(rank) for rank in range(len(NAMES))]

    def join(self, rank: int) -> Health:
        boards = Boards.of_threads(self.store, rank, len(NAMES))
        return Health(boards, rank, NAMES, self.failed[rank].set, silence_s=0.3, beat_s=0.02)

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


def test_healthy_group_reports_no_failure(group: Group) -> None:
    time.sleep(0.5)
    for health in group.healths:
        health.check()
        assert health.watching
    assert not any(failed.is_set() for failed in group.failed)


def test_silent_rank_is_named_by_the_others(group: Group) -> None:
    time.sleep(0.1)
    group.fall_silent(2)
    begin = time.perf_counter()
    for rank in (0, 1):
        assert group.failed[rank].wait(2.0)
        with pytest.raises(DeviceLost, match=r"host2 .* 0 s: .*stopped"):
            group.healths[rank].check()
    assert time.perf_counter() - begin < 1.0
    assert not group.failed[2].is_set()


def test_orderly_exit_is_not_a_failure(group: Group) -> None:
    time.sleep(0.1)
    group.healths[2].close()
    time.sleep(0.6)
    group.healths[0].check()
    group.healths[1].check()


def test_first_report_reaches_all_ranks(group: Group) -> None:
    group.healths[1].report(ValueError("no more paper\nsecond line"))
    group.healths[2].report(ValueError("too late"))
    for rank, failed in enumerate(group.failed):
        assert failed.wait(2.0)
        with pytest.raises(RunError, match=r"^host1: no more paper$"):
            group.healths[rank].check()
    assert not isinstance(group.healths[0].failure, DeviceLost)


def test_out_of_memory_is_reported_as_such(group: Group) -> None:
    group.healths[1].report(MemoryError())
    for rank, failed in enumerate(group.failed):
        assert failed.wait(2.0)
        with pytest.raises(OutOfMemory, match=r"^host1: MemoryError$"):
            group.healths[rank].check()


def test_wait_for_failure_has_a_deadline(group: Group) -> None:
    begin = time.perf_counter()
    group.healths[0].wait_for_failure(0.2)
    assert 0.2 <= time.perf_counter() - begin < 1.0


def test_process_without_any_heartbeat_is_lost() -> None:
    store = HashStore()
    failed = threading.Event()
    health = Health(Boards.of_threads(store, 0, 2), 0, NAMES[:2], failed.set, silence_s=0.05, beat_s=0.02)
    try:
        assert failed.wait(2.0)
        with pytest.raises(DeviceLost, match="host1"):
            health.check()
    finally:
        health.close()


class Pair:
    """Two processes' healths in one, each with a board of its own."""

    def __init__(self) -> None:
        self.boards = [serve_store(LOOPBACK) for _ in range(2)]
        self.failed = [threading.Event() for _ in range(2)]
        for rank, board in enumerate(self.boards):
            prepare_board(board, rank)
        ports = [board.port for board in self.boards]
        self.healths = [self._join(rank, ports[1 - rank]) for rank in range(2)]

    def _join(self, rank: int, port: int) -> Health:
        boards = Boards(self.boards[rank], {1 - rank: lambda: connect_store(LOOPBACK, port)})
        return Health(boards, rank, NAMES[:2], self.failed[rank].set, silence_s=0.3, beat_s=0.02)

    def end(self, rank: int) -> None:
        """As a killed process does: its board goes, and nothing more is said."""
        self.healths[rank]._stop.set()
        self.healths[rank]._thread.join()
        self.healths[rank]._boards = Boards(HashStore(), {})
        del self.boards[rank]
        gc.collect()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for health in made.healths:
        health.close()
    made.boards.clear()


@pytest.mark.parametrize("rank", [0, 1])
def test_lost_board_means_lost_process(pair: Pair, rank: int) -> None:
    time.sleep(0.1)
    pair.healths[1 - rank]._silence_s = 2.0  # a broken connection says it sooner, also on a busy machine
    pair.end(rank)
    assert pair.failed[1 - rank].wait(3.0)
    with pytest.raises(DeviceLost, match=f"{NAMES[rank]} is lost"):
        pair.healths[1 - rank].check()


def test_idle_process_that_answers_is_alive(pair: Pair) -> None:
    time.sleep(0.1)
    pair.healths[1]._stop.set()  # as while its interpreter is held: no beat, but its board answers
    pair.healths[1]._thread.join()
    time.sleep(1.0)
    pair.healths[0].check()
    assert pair.healths[0].watching


@pytest.mark.parametrize("delay_s", [1.2, long(0.4)])
def test_a_slow_link_is_not_silence(delay_s: float) -> None:
    """One question may take nearly as long as a silence: there is one on the way at a time, and it needs one answer."""

    class Far(HashStore):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            time.sleep(delay_s)
            found: list[bytes] = super().multi_get(keys)
            return found

    far, failed = Far(), threading.Event()
    prepare_board(far, 1)
    health = Health(Boards(HashStore(), {1: lambda: far}), 0, NAMES[:2], failed.set, silence_s=1.5, beat_s=0.01)
    try:
        assert not failed.wait(3.0)
    finally:
        health.close()


def test_invalid_board_content_is_a_verdict(pair: Pair) -> None:
    pair.boards[0].set("verdict", "{")
    for health, failed in zip(pair.healths, pair.failed, strict=True):
        assert failed.wait(3.0)
        with pytest.raises(RunError, match=r"report .*versions"):
            health.check()


@pytest.mark.parametrize("nonsense", ["\xff", "x" * 100])
def test_invalid_heartbeat_keeps_the_watch(pair: Pair, nonsense: str) -> None:
    pair.boards[1].set("beat/1", nonsense)
    time.sleep(0.2)
    pair.healths[0].check()
    pair.healths[1].report(ValueError("no more paper"))
    assert pair.failed[0].wait(3.0)
    with pytest.raises(RunError, match="host1: no more paper"):
        pair.healths[0].check()


def test_a_status_that_fails_is_a_verdict(pair: Pair) -> None:
    def fail() -> str:
        raise KeyError("stage 3")

    pair.healths[1].status = fail
    for failed in pair.failed:
        assert failed.wait(3.0)
    with pytest.raises(RunError, match=r"^host1: .*: 'stage 3'$"):
        pair.healths[0].check()


def test_suspended_process_blames_no_other_rank(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    time.sleep(0.1)
    real, began = time.monotonic, time.monotonic()
    # an hour in which this process was suspended, and so was its clock of answers
    monkeypatch.setattr("penstock.group.liveness.time.monotonic", lambda: real() + (3600.0 if real() > began else 0.0))
    time.sleep(0.2)
    for health in pair.healths:
        health.check()


def test_statuses_travel_with_the_beats(group: Group) -> None:
    group.healths[1].status = lambda: '[0, "a b"]'
    deadline = time.monotonic() + 2.0
    while '[0, "a b"]' not in group.healths[0].statuses() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert '[0, "a b"]' in group.healths[0].statuses()
    assert group.healths[1].statuses()[0] == '[0, "a b"]'
