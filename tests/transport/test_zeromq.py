"""What a transport promises, over TCP without a key, with one, and in a folder of one account."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from torch import Tensor

from penstock.errors import ConnectionBroken, RunError, TransportError
from penstock.group.addresses import PrivateFolder
from penstock.group.zmq_store import Prefixed, StoreServer, ZmqStore
from penstock.transport.base import receive_bytes, send_bytes
from penstock.transport.connections import Connections, FolderConnections, TcpConnections
from penstock.transport.curve import Curve, make_key
from penstock.transport.zeromq import _DATA, _HEADER, _NAME, _STRETCH_BYTES, ZmqTransport

KEY = make_key()
KINDS: dict[str, Callable[[], Connections]] = {
    "tcp": TcpConnections,
    "key": lambda: Curve(KEY),
    "folder": FolderConnections,
}


def filled(value: int, size: int = 8) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


class Room:
    """Three ranks in this process, each with sockets of its own, and where they meet."""

    def __init__(self, size: int = 3, *, kind: str) -> None:
        self.folder = PrivateFolder() if kind == "folder" else None
        self.host = self.folder.path if self.folder is not None else "127.0.0.1"
        self.connections = [KINDS[kind]() for _ in range(size)]
        self.store = StoreServer(self.connections[0], self.host)
        made: dict[int, ZmqTransport] = {}

        def make(rank: int) -> None:
            own = self.connections[rank]
            store = ZmqStore(own, self.host, self.store.port)
            made[rank] = ZmqTransport(own, Prefixed(store, "g"), rank, size, self.host, join_s=20.0)  # type: ignore[arg-type]
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
        for connections in self.connections:
            connections.close()
        if self.folder is not None:
            self.folder.close()


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def room(kind: str) -> Iterator[Room]:
    made = Room(kind=kind)
    yield made
    made.close()


@pytest.fixture
def place(kind: str) -> Iterator[tuple[Connections, str]]:
    """Connections, and an address on which nobody listens yet."""
    folder = PrivateFolder()
    connections = KINDS[kind]()
    yield connections, folder.path if kind == "folder" else "127.0.0.1"
    connections.close()
    folder.close()


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


@pytest.mark.parametrize(
    ("parts", "more"), [(0, 0), (0, 1), (1, 0), (1, 1), (3, 5), (0, _STRETCH_BYTES), (0, 2 * _STRETCH_BYTES + 5)]
)
def test_messages_of_any_length(room: Room, parts: int, more: int) -> None:
    size = parts * room.connections[0].part_bytes + more
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


def test_too_long_message_is_an_error(room: Room) -> None:
    first, second, _ = room.ranks
    receive = second.receive(torch.zeros(4, dtype=torch.uint8), 0, 2)
    first.send(filled(1), 1, 2).wait()
    with pytest.raises(TransportError, match=r"a message of 8 bytes does not fit .* 4$"):
        receive.wait()


def test_a_process_of_another_group_sends_nothing(room: Room) -> None:
    """As one that an earlier run has left: it may connect, and calls itself a rank that is here."""
    first, second, _ = room.ranks
    host, port = room.store.get("g/data/1").decode().split()
    stray = room.connections[0].connect(host, int(port), _NAME.pack(b"r", 0, b"another group..."))
    for _ in range(3):
        stray.socket.send_multipart([_HEADER.pack(_DATA, 3), bytes(8)])
    time.sleep(0.2)
    buffer = torch.zeros(8, dtype=torch.uint8)
    receive = second.receive(buffer, 0, 3)
    first.send(filled(5), 1, 3).wait()
    receive.wait()
    assert buffer.tolist() == [5] * 8
    stray.close()


def test_abort_ends_every_wait(kind: str) -> None:
    room = Room(2, kind=kind)
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
        with pytest.raises(ConnectionBroken, match="rank 1 was aborted"):
            room.ranks[0].send(filled(0), 1, 1)
    finally:
        room.close()


def test_zeromq_store_behaves_like_torch(room: Room) -> None:
    store = ZmqStore(room.connections[1], room.host, room.store.port)
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
        with pytest.raises(RuntimeError, match=r"not found .*: missing$"):
            store.get("missing")
        with pytest.raises(RuntimeError, match="at most 65536 characters; got 100000"):
            store.set("large", "x" * 100_000)
        assert room.store.get("a") == b"1"
    finally:
        store.close()


def test_store_of_a_lost_process_is_reported(place: tuple[Connections, str]) -> None:
    connections, host = place
    server = StoreServer(connections, host)
    store = ZmqStore(connections, host, server.port)
    server.close()
    with pytest.raises(RuntimeError, match="broke"):
        store.get("a")
    store.close()


def test_store_lost_between_two_calls(place: tuple[Connections, str]) -> None:
    """There is nobody to send to then, and ZeroMQ would wait for somebody."""
    connections, host = place
    server = StoreServer(connections, host)
    store = ZmqStore(connections, host, server.port)
    store.set("a", "1")
    server.close()
    time.sleep(0.5)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="broke"):
        store.get("a")
    assert time.monotonic() - began_s < 2.0
    store.close()


@pytest.mark.parametrize("cycle", [False, True])
def test_dropped_stores_block_no_rank(place: tuple[Connections, str], cycle: bool) -> None:
    """libzmq's threads waited for ever to tell a monitor that was gone before its socket, now and then."""
    connections, host = place
    server = StoreServer(connections, host)
    store = ZmqStore(connections, host, server.port)
    num_open = psutil.Process().num_fds()
    for _ in range(100):
        dropped = ZmqStore(connections, host, server.port)
        dropped.check(["a"])
        if cycle:
            dropped.itself = dropped  # type: ignore[attr-defined]
    del dropped
    gc.collect()
    time.sleep(0.5)
    assert psutil.Process().num_fds() < num_open + 20
    server.close()
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="broke"):
        store.get("a")
    assert time.monotonic() - began_s < 2.0
    store.close()


def test_lost_rank_ends_only_its_own_messages(kind: str) -> None:
    room = Room(3, kind=kind)
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


def test_missing_rank_is_named(place: tuple[Connections, str]) -> None:
    connections, host = place
    server = StoreServer(connections, host)
    with pytest.raises(RunError, match="rank 1 has not published its address"):
        ZmqTransport(connections, server, 0, 2, host, join_s=0.3)
    server.close()


def test_too_long_message_of_several_stretches_is_an_error(room: Room) -> None:
    first, second, _ = room.ranks
    receive = second.receive(torch.zeros(4, dtype=torch.uint8), 0, 2)
    first.send(torch.zeros(_STRETCH_BYTES + 8, dtype=torch.uint8), 1, 2).wait()
    with pytest.raises(TransportError, match=f"{_STRETCH_BYTES + 8} bytes"):
        receive.wait()
