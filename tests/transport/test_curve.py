"""Connections that prove a key: what a stranger gets."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import zmq

from benchmarks.faults.strangers import FORGED, attack, hold, record_handshake, replayed
from penstock.errors import UsageError
from penstock.group.zmq_store import MAX_VALUE_BYTES, ZmqStore
from penstock.transport.connections import MOST_UNPROVED
from penstock.transport.curve import Curve, make_key, read_key, write_key
from tests.transport.test_zeromq import KEY, Room, filled

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    made = Room(kind="key")
    yield made
    made.close()


def test_wrong_key_is_refused(room: Room) -> None:
    stranger = Curve(make_key())
    try:
        with pytest.raises(RuntimeError, match=r"does not prove this run's key|has not answered"):
            stranger.connect(HOST, room.store.port, b"x", 3.0)
    finally:
        stranger.close()


def test_public_key_alone_is_refused(room: Room) -> None:
    """The listener's key is not enough: whoever connects proves that it has the secret."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connecting = context.socket(zmq.DEALER)
    connecting.linger = 0
    connecting.curve_serverkey = zmq.curve_public(KEY)
    connecting.curve_publickey, connecting.curve_secretkey = zmq.curve_keypair()
    connecting.connect(f"tcp://{HOST}:{room.store.port}")
    connecting.send(b'[1,"check",["a"]]')
    assert not connecting.poll(1000)
    context.destroy(linger=0)


def test_bytes_of_strangers_change_nothing(room: Room) -> None:
    first, second, _ = room.ranks
    ports = [room.store.port, *(int(room.store.get(f"g/data/{rank}").split()[1]) for rank in range(3))]
    recorded = Curve(KEY)
    forge = [*FORGED, replayed(record_handshake(recorded, room.store.port))]
    recorded.close()
    for index in range(10):
        attack(ports, forge, 40, seed=index)
        buffer = torch.zeros(8, dtype=torch.uint8)
        receive = second.receive(buffer, 0, 4)
        first.send(filled(index), 1, 4).wait()
        receive.wait()
        assert int(buffer[0]) == index
    store = ZmqStore(room.connections[1], HOST, room.store.port)
    store.set("after", "fine")
    assert store.get("after") == b"fine"
    store.close()


def test_held_connections_cost_little_and_block_no_rank(room: Room) -> None:
    """A stranger that announces 4 MiB and withholds the end, or says nothing, does not count for long."""
    ports = [room.store.port, int(room.store.get("g/data/1").split()[1])]
    before = psutil.Process().memory_info().rss
    held = hold(ports, 1000)
    try:
        assert psutil.Process().memory_info().rss - before < 48 * 2**20
        store = ZmqStore(room.connections[1], HOST, room.store.port)
        store.set("beside", "fine")
        assert store.get("beside") == b"fine"
        store.close()
        assert sum(map(_is_open, held)) <= 2 * MOST_UNPROVED
    finally:
        for stranger in held:
            stranger.close()


def _is_open(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def test_connections_that_have_proved_the_key_are_kept(room: Room) -> None:
    own = [ZmqStore(room.connections[1], HOST, room.store.port) for _ in range(MOST_UNPROVED + 8)]
    for stranger in hold([room.store.port], 2 * MOST_UNPROVED):
        stranger.close()
    for number, store in enumerate(own):
        store.set(f"own/{number}", "here")
        store.close()


def test_long_value_is_stored_after_authentication(room: Room) -> None:
    store = ZmqStore(room.connections[1], HOST, room.store.port)
    text = '"' * (MAX_VALUE_BYTES - 1)  # twice as long in JSON
    store.set("long", text)
    assert store.get("long").decode() == text
    store.close()


def test_keys_are_files_of_one_account(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    write_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_key(path)) == 40
    with pytest.raises(UsageError, match="keys are not overwritten"):
        write_key(path)
    os.chmod(path, 0o640)
    with pytest.raises(UsageError, match="other users may read"):
        read_key(path)
    os.chmod(path, 0o600)
    path.write_text("no key at all")
    with pytest.raises(UsageError, match="holds no valid key"):
        read_key(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_key(tmp_path / "none")
