"""How processes find each other, and what they say when they do not."""

import gc
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken, DeviceLost, RunError, TransportError
from penstock.group.entry import join_torchrun, under_torchrun
from penstock.group.world import World
from tests.processes import free_port, run_ranks
from tests.worlds import memory_world

LOOPBACK = "127.0.0.1"


def torchrun_variables(monkeypatch: pytest.MonkeyPatch, port: int, rank: int = 0, size: int = 1) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_ADDR", LOOPBACK), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not under_torchrun()
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        torchrun_variables(monkeypatch, port)
        assert under_torchrun()
        with pytest.raises(RunError, match=f"port {port} on {LOOPBACK} is in use"):
            join_torchrun()


def join_alone(_rank: int, _store: Store, port: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        torchrun_variables(patch, port)
        patch.setenv("PENSTOCK_HOST", "board")
        world = join_torchrun()
    world.close()
    world.close()
    return [world.rank, world.devices, world.names]


def test_one_process_forms_a_world(tmp_path: Path) -> None:
    assert run_ranks(join_alone, 1, 60.0, tmp_path, free_port()) == [[0, [0], ["rank 0 on board"]]]


def join_twice(rank: int, _store: Store, port: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        torchrun_variables(patch, port, rank, 2)
        worlds = [join_torchrun(), join_torchrun()]  # the first one is there yet
    names = [world.names for world in worlds]
    for world in worlds:
        world.close()
    return {"names": names}


def test_processes_join_again_without_torchrun(tmp_path: Path) -> None:
    results = run_ranks(join_twice, 2, 60.0, tmp_path, free_port())
    assert [len(names) for result in results for names in result["names"]] == [2] * 4


def count_open_files(_rank: int, _store: Store, port: int) -> list[int]:
    """Return the number of open files after two worlds, and after ten more."""

    def join(times: int, wanted: int = 0, within_s: float = 5.0) -> int:
        """Join so often, and count the files that stay open: on a busy machine connections take their time to close."""
        for _ in range(times):
            join_torchrun().close()
        gc.collect()
        fewest, deadline = len(list(Path("/proc/self/fd").iterdir())), time.monotonic() + within_s
        while fewest > wanted and time.monotonic() < deadline:
            time.sleep(0.1)
            fewest = min(fewest, len(list(Path("/proc/self/fd").iterdir())))
        return fewest

    with pytest.MonkeyPatch.context() as patch:
        torchrun_variables(patch, port)
        first = join(2, within_s=1.0)
        return [first, join(10, first + 1)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_repeated_joins_leave_no_open_files(tmp_path: Path) -> None:
    ((first, last),) = run_ranks(count_open_files, 1, 60.0, tmp_path, free_port())
    assert last <= first + 1


def test_world_closes_everything_despite_errors() -> None:
    closed: list[str] = []

    def fails(name: str) -> Any:
        def close(*_: object) -> None:
            closed.append(name)
            raise RuntimeError(name)

        return SimpleNamespace(close=close, stop=close)

    world = World(
        transport=fails("transport"), health=fails("health"), workers=fails("workers"), served=fails("store"),
        names=[], devices=[], store=HashStore(), bandwidths=[],
    )  # fmt: skip
    with pytest.raises(RuntimeError):
        world.close()
    assert closed == ["health", "workers", "transport", "store"]


def test_a_broken_connection_is_explained_by_the_verdict() -> None:
    with memory_world(2, reason_s=5.0) as world:
        threading.Timer(0.2, lambda: world.workers[1].health.report(ValueError("no more memory"))).start()
        begin = time.perf_counter()
        reason = world.feeder.explain(ConnectionBroken("the connection to rank 2 broke"))
        assert time.perf_counter() - begin < 2.0
        assert (type(reason), str(reason)) == (RunError, "worker 2: no more memory")


def test_broken_connection_without_verdict_reaches_all_ranks() -> None:
    with memory_world(2, reason_s=0.1) as world:
        error = ConnectionBroken("the connection to rank 2 broke")
        assert world.feeder.explain(error) is error
        with pytest.raises(RunError, match="the driver: the connection to rank 2 broke"):
            world.workers[0].health.wait_for_failure(2.0)


def test_damaged_message_needs_no_verdict() -> None:
    with memory_world(2, reason_s=5.0) as world:
        begin = time.perf_counter()
        error = TransportError("message 3 is damaged")
        assert world.feeder.explain(error) is error
        assert time.perf_counter() - begin < 1.0
        with pytest.raises(RunError, match="message 3 is damaged"):
            world.workers[1].health.wait_for_failure(2.0)


def test_first_verdict_wins() -> None:
    with memory_world(2) as world:
        world.workers[0].health.report(ValueError("first"))
        world.feeder.health.report(ValueError("second"))
        with pytest.raises(RunError, match="worker 1: first") as caught:
            world.feeder.check()
        assert not isinstance(caught.value, DeviceLost)
