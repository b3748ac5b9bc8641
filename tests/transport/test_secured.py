"""Connections that prove a key: what a transport promises, and what a stranger gets."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq
from torch import Tensor

from benchmarks.faults.strangers import FORGED, attack, record_handshake, replayed
from penstock.errors import ConnectionBroken, RunError, TransportError, UsageError
from penstock.group.secured_store import Prefixed, SecuredStore, StoreServer
from penstock.transport.base import receive_bytes, send_bytes
from penstock.transport.curve import PART_BYTES, Curve, make_key, read_key, write_key
from penstock.transport.secured import SecuredTransport

HOST = "127.0.0.1"


def filled(value: int, size: int = 8) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


class Room:
    """Three ranks in this process, each with sockets of its own, and where they meet."""

    def __init__(self, size: int = 3) -> None:
        self.key = make_key()
        self.curves = [Curve(self.key) for _ in range(size)]
        self.store = StoreServer(self.curves[0], HOST)
        made: dict[int, SecuredTransport] = {}

        def make(rank: int) -> None:
            store = SecuredStore(self.curves[rank], HOST, self.store.port)
            made[rank] = SecuredTransport(self.curves[rank], Prefixed(store, "g"), rank, size, HOST, join_s=20.0)  # type: ignore[arg-type]
            store.close()

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        self.ranks = [made[rank] for rank in range(size)]

    def close(self) -> None:
        for transport in self.ranks:
            transport.close()
        self.store.close()
        for curve in self.curves:
            curve.close()


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    made = Room()
    yield made
    made.close()


def test_messages_on_a_tag_arrive_in_order_and_apart_from_others(room: Room) -> None:
    first, second, third = room.ranks
    buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(4)]
    receives = [second.receive(buffers[0], 0, 5), second.receive(buffers[1], 0, 5), second.receive(buffers[2], 0, 6)]
    receives.append(second.receive(buffers[3], 2, 5))
    sends = [first.send(filled(3), 1, 6), first.send(filled(1), 1, 5), first.send(filled(2), 1, 5)]
    sends.append(third.send(filled(4), 1, 5))
    for pending in (*sends, *receives):
        pending.wait()
    assert [int(buffer[0]) for buffer in buffers] == [1, 2, 3, 4]


def test_a_send_is_done_when_a_receive_is_posted(room: Room) -> None:
    first, second, _ = room.ranks
    done = threading.Event()
    pending = first.send(filled(7), 1, 9)

    def wait() -> None:
        pending.wait()
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not done.wait(0.3)
    buffer = torch.zeros(16, dtype=torch.uint8)
    second.receive(buffer, 0, 9).wait()
    assert done.wait(5.0)
    thread.join()
    assert buffer.tolist() == [7] * 8 + [0] * 8


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 5])
def test_messages_of_any_length(room: Room, size: int) -> None:
    first, second, _ = room.ranks
    sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
    received = torch.zeros(size + 3, dtype=torch.uint8)
    receive = second.receive(received, 0, 1)
    first.send(sent, 1, 1).wait()
    receive.wait()
    assert torch.equal(received[:size], sent)
    data = sent.numpy().tobytes()
    thread = threading.Thread(target=send_bytes, args=(first, data, 1))
    thread.start()
    assert receive_bytes(second, 0, limit=size + 1) == data
    thread.join()


def test_a_message_that_is_too_long_is_an_error_and_no_crash(room: Room) -> None:
    first, second, _ = room.ranks
    receive = second.receive(torch.zeros(4, dtype=torch.uint8), 0, 2)
    first.send(filled(1), 1, 2).wait()
    with pytest.raises(TransportError, match="a message of 8 bytes does not fit the 4"):
        receive.wait()


def test_abort_ends_every_wait() -> None:
    room = Room(2)
    try:
        pending = [room.ranks[0].receive(filled(0), 1, 1), room.ranks[0].send(filled(0), 1, 2)]
        failed: list[Exception] = []

        def wait(each: object) -> None:
            try:
                each.wait()  # type: ignore[attr-defined]
            except ConnectionBroken as error:
                failed.append(error)

        threads = [threading.Thread(target=wait, args=(each,)) for each in pending]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        room.ranks[0].abort()
        for thread in threads:
            thread.join(5.0)
        assert len(failed) == 2
        with pytest.raises(ConnectionBroken, match="was given up"):
            room.ranks[0].send(filled(0), 1, 1)
    finally:
        room.close()


def test_a_store_does_what_torchs_does(room: Room) -> None:
    store = SecuredStore(room.curves[1], HOST, room.store.port)
    try:
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert store.check(["a"])
        assert not store.check(["a", "b"])
        assert store.compare_set("b", "", "2") == b"2"
        assert store.compare_set("b", "", "3") == b"2"
        assert store.compare_set("b", "2", "3") == b"3"
        assert store.multi_get(["a", "b"]) == [b"1", b"3"]
        assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
        with pytest.raises(RuntimeError, match="there is no missing in the store"):
            store.get("missing")
        with pytest.raises(RuntimeError, match="takes no more"):
            store.set("large", "x" * 100_000)
        assert room.store.get("a") == b"1"
    finally:
        store.close()


def test_a_store_whose_process_is_gone() -> None:
    curve = Curve(make_key())
    server = StoreServer(curve, HOST)
    store = SecuredStore(curve, HOST, server.port)
    server.close()
    with pytest.raises(RuntimeError, match="broke"):
        store.get("a")
    store.close()
    curve.close()


def test_a_store_that_went_between_two_questions() -> None:
    """There is nobody to send to then, and ZeroMQ would wait for somebody."""
    curve = Curve(make_key())
    server = StoreServer(curve, HOST)
    store = SecuredStore(curve, HOST, server.port)
    store.set("a", "1")
    server.close()
    time.sleep(0.5)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="broke"):
        store.get("a")
    assert time.monotonic() - began_s < 2.0
    store.close()
    curve.close()


def test_a_rank_that_is_gone_ends_what_goes_to_it_and_nothing_else() -> None:
    room = Room(3)
    try:
        room.ranks[2].close()
        time.sleep(0.5)
        with pytest.raises(ConnectionBroken):
            room.ranks[0].send(filled(1), 2, 1).wait()
        with pytest.raises(ConnectionBroken):
            room.ranks[0].receive(filled(1), 2, 1).wait()
        buffer = torch.zeros(8, dtype=torch.uint8)
        receive = room.ranks[1].receive(buffer, 0, 1)
        room.ranks[0].send(filled(5), 1, 1).wait()
        receive.wait()
        assert int(buffer[0]) == 5
    finally:
        room.close()


def test_another_key_gets_nowhere(room: Room) -> None:
    stranger = Curve(make_key())
    try:
        with pytest.raises(RuntimeError, match=r"does not prove this run's key|has not answered"):
            stranger.connect(HOST, room.store.port, b"x", 3.0)
    finally:
        stranger.close()


def test_who_knows_the_public_key_alone_gets_nowhere(room: Room) -> None:
    """The listener's key is not enough: whoever connects proves that it has the secret."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connecting = context.socket(zmq.DEALER)
    connecting.linger = 0
    connecting.curve_serverkey = zmq.curve_public(room.key)
    connecting.curve_publickey, connecting.curve_secretkey = zmq.curve_keypair()
    connecting.connect(f"tcp://{HOST}:{room.store.port}")
    connecting.send(b'[1,"check",["a"]]')
    assert not connecting.poll(1000)
    context.destroy(linger=0)


def test_bytes_of_strangers_change_nothing(room: Room) -> None:
    first, second, _ = room.ranks
    ports = [room.store.port, *(int(room.store.get(f"g/data/{rank}").split()[1]) for rank in range(3))]
    forge = [*FORGED, replayed(record_handshake(room.curves[2], room.store.port))]
    for index in range(10):
        attack(ports, forge, 40, seed=index)
        buffer = torch.zeros(8, dtype=torch.uint8)
        receive = second.receive(buffer, 0, 4)
        first.send(filled(index), 1, 4).wait()
        receive.wait()
        assert int(buffer[0]) == index
    store = SecuredStore(room.curves[1], HOST, room.store.port)
    store.set("after", "fine")
    assert store.get("after") == b"fine"
    store.close()


def test_a_rank_that_does_not_come() -> None:
    curve = Curve(make_key())
    server = StoreServer(curve, HOST)
    try:
        with pytest.raises(RunError, match="rank 1 has not said where it listens"):
            SecuredTransport(curve, server, 0, 2, HOST, join_s=0.3)
    finally:
        server.close()
        curve.close()


def test_keys_are_files_of_one_account(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    write_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_key(path)) == 40
    with pytest.raises(UsageError, match="is not written over"):
        write_key(path)
    os.chmod(path, 0o640)
    with pytest.raises(UsageError, match="others may read"):
        read_key(path)
    os.chmod(path, 0o600)
    path.write_text("no key at all")
    with pytest.raises(UsageError, match="holds no key"):
        read_key(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_key(tmp_path / "none")
