"""The transport over gloo, between fresh processes and between threads of this one."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from penstock.errors import ConnectionBroken, RunError
from penstock.group.addresses import local_address
from penstock.transport.gloo import GlooTransport
from tests.processes import run_python, run_ranks

LOOPBACK = "127.0.0.1"
# rank 1 stops itself when its receive is posted, so that rank 0 has sent a part of its message when it aborts
HALF_A_MESSAGE = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import torch
from torch.distributed import FileStore
from penstock.errors import ConnectionBroken
from penstock.transport.gloo import GlooTransport

folder, rank = sys.argv[1], int(sys.argv[2])
peer = subprocess.Popen([sys.executable, "-c", os.environ["SCRIPT"], folder, "1"]) if not rank else None
try:
    transport = GlooTransport(FileStore(folder + "/store", 2), rank, 2, "127.0.0.1")
    message = torch.zeros(64 << 20, dtype=torch.uint8)
    if peer is None:
        pending = transport.receive(message, 0, 1)
        os.kill(os.getpid(), signal.SIGSTOP)
    while Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    threading.Timer(1.0, transport.abort).start()
    try:
        transport.send(message, 1, 1).wait()
    except ConnectionBroken:
        print("ended")
    transport.close()
finally:
    if peer is not None:
        peer.kill()
        peer.wait()
"""


def both(store: Store, name: str = "data", join_s: float = 10.0) -> list[GlooTransport]:
    """Two ranks in this process."""
    made: dict[int, GlooTransport] = {}

    def join(rank: int) -> None:
        made[rank] = GlooTransport(store, rank, 2, LOOPBACK, name=name, join_s=join_s)

    thread = threading.Thread(target=join, args=(1,))
    thread.start()
    join(0)
    thread.join()
    return [made[0], made[1]]


@pytest.fixture
def pair() -> Iterator[list[GlooTransport]]:
    made = both(HashStore())
    yield made
    for transport in made:
        transport.close()


def talk(rank: int, store: Store) -> dict[str, Any]:
    """Two groups after each other in one process; in each a full message, a short one, and an abort."""
    ended_s = []
    for name in ("first", "second"):
        transport = GlooTransport(store, rank, 2, LOOPBACK, name=name)
        if rank == 0:
            transport.send(torch.arange(100, dtype=torch.uint8), to=1, tag=3).wait()
            transport.send(torch.ones(10, dtype=torch.uint8), to=1, tag=3).wait()
        else:
            buffers = [torch.zeros(100, dtype=torch.uint8) for _ in range(2)]
            for pending in [transport.receive(buffer, 0, 3) for buffer in buffers]:
                pending.wait()
            assert torch.equal(buffers[0], torch.arange(100, dtype=torch.uint8))
            assert buffers[1].tolist() == [1] * 10 + [0] * 90
        stuck = transport.receive(torch.zeros(1, dtype=torch.uint8), 1 - rank, 4)
        threading.Timer(0.2, transport.abort).start()
        begin = time.perf_counter()
        with pytest.raises(ConnectionBroken, match=f"rank {1 - rank}"):
            stuck.wait()
        ended_s.append(time.perf_counter() - begin - 0.2)
        transport.close()
    return {"ended_s": ended_s}


def test_two_processes_two_groups_one_after_the_other(tmp_path: Path) -> None:
    results = run_ranks(talk, 2, 60.0, tmp_path)
    assert max(max(result["ended_s"]) for result in results) < 5.0  # not the 60 s of a deadline


def test_messages_wait_for_their_receiver(pair: list[GlooTransport]) -> None:
    pending = pair[0].send(torch.ones(1000, dtype=torch.uint8), to=1, tag=1)
    done = threading.Event()

    def wait() -> None:
        pending.wait()
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not done.wait(0.2)
    pair[1].receive(torch.zeros(1000, dtype=torch.uint8), 0, 1).wait()
    thread.join(5.0)
    assert done.is_set()


def test_abort_ends_waits_and_what_comes_after(pair: list[GlooTransport]) -> None:
    pending = pair[1].receive(torch.zeros(8, dtype=torch.uint8), 0, 1)
    threading.Timer(0.1, pair[1].abort).start()
    begin = time.perf_counter()
    with pytest.raises(ConnectionBroken, match="rank 0"):
        pending.wait()
    assert time.perf_counter() - begin < 5.0
    with pytest.raises(ConnectionBroken):
        pair[1].send(torch.zeros(8, dtype=torch.uint8), 0, 1)


def test_an_abort_takes_no_message_from_who_waits_for_it() -> None:
    for trial in range(20):
        sender, receiver = both(HashStore())

        def send(transport: GlooTransport = sender) -> None:
            with contextlib.suppress(ConnectionBroken):
                while True:
                    transport.send(torch.ones(64, dtype=torch.uint8), 1, 1).wait()

        def receive(transport: GlooTransport = receiver) -> None:
            with contextlib.suppress(ConnectionBroken):
                while True:
                    transport.receive(torch.zeros(64, dtype=torch.uint8), 0, 1).wait()

        threads = [threading.Thread(target=target, daemon=True) for target in (send, receive)]
        for thread in threads:
            thread.start()
        time.sleep(trial / 2000)
        receiver.abort()
        for thread in threads:
            thread.join(5.0)
        assert not any(thread.is_alive() for thread in threads)
        for transport in (sender, receiver):
            transport.close()


def test_an_abort_ends_the_wait_for_half_a_message(tmp_path: Path) -> None:
    ended = run_python("-c", HALF_A_MESSAGE, str(tmp_path), "0", deadline_s=60, env={"SCRIPT": HALF_A_MESSAGE})
    assert ended.stdout.split()[-1:] == ["ended"], ended


def test_waits_outlive_the_deadline_for_joining() -> None:
    transports = both(HashStore(), join_s=0.5)
    buffer = torch.zeros(4, dtype=torch.uint8)
    pending = transports[1].receive(buffer, 0, 1)
    threading.Timer(1.2, lambda: transports[0].send(torch.ones(4, dtype=torch.uint8), 1, 1).wait()).start()
    pending.wait()
    assert buffer.tolist() == [1] * 4
    for transport in transports:
        transport.close()


def test_what_is_watched_meanwhile_may_end_the_wait() -> None:
    def watch() -> None:
        raise RunError("worker 1 is gone")

    with pytest.raises(RunError, match="worker 1 is gone"):
        GlooTransport(HashStore(), 0, 2, LOOPBACK, watch=watch, join_s=1.0)


def test_the_address_towards_another_host() -> None:
    assert local_address(LOOPBACK) == LOOPBACK
    with pytest.raises(RunError, match="no route to 'no such host'"):
        local_address("no such host")
