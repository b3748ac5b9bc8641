"""The in-process network, bytes and tensors over it, and calls with a deadline."""

import gc
import inspect
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from penstock.errors import ConnectionBroken, RunError, TransportError
from penstock.transport.base import WORD_BYTES, receive_bytes, receive_tensor, run_watched, send_bytes, send_tensor
from penstock.transport.memory_network import MemoryNetwork
from tests.cluster.labs import until


def data(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_messages_arrive_in_order_and_by_channel() -> None:
    network = MemoryNetwork(2)
    first, second = network.transports
    other = torch.zeros(2, dtype=torch.uint8)
    pending = second.receive(other, source=0, tag=9)
    sends = [first.send(data(value), to=1, tag=1) for value in range(5)]
    buffers = [torch.zeros(1, dtype=torch.uint8) for _ in range(5)]
    for buffer in buffers:
        second.receive(buffer, source=0, tag=1).wait()
    assert [int(buffer) for buffer in buffers] == [0, 1, 2, 3, 4]
    for send in sends:
        send.wait()
    first.send(data(7), to=1, tag=9).wait()
    pending.wait()
    assert other.tolist() == [7, 0]
    assert network.num_open() == 0


def test_message_longer_than_its_buffer_is_refused() -> None:
    network = MemoryNetwork(2)
    network.transports[0].send(data(1, 2, 3), to=1, tag=1)
    with pytest.raises(TransportError, match=r"3 bytes does not fit .* 2$"):
        network.transports[1].receive(torch.zeros(2, dtype=torch.uint8), source=0, tag=1).wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_abort_ends_waits_on_both_sides_at_once(rank: int) -> None:
    network = MemoryNetwork(3)
    pending = network.transports[1].receive(torch.zeros(1, dtype=torch.uint8), source=0, tag=1)
    threading.Timer(0.05, network.transports[rank].abort).start()
    begin = time.perf_counter()
    with pytest.raises(ConnectionBroken):
        pending.wait()
    assert time.perf_counter() - begin < 1.0
    with pytest.raises(ConnectionBroken):
        network.transports[1].send(data(1), to=0, tag=1)
    if rank == 0:
        network.transports[1].send(data(1), to=2, tag=1)


@pytest.mark.parametrize("sent", [b"", b"x", b"12" * 2**11, b"12" * 2**11 + b"3", b"penstock" * 1000])
def test_bytes_arrive_over_memory(sent: bytes) -> None:
    network = MemoryNetwork(2)
    thread = threading.Thread(target=send_bytes, args=(network.transports[0], sent, 1))
    thread.start()
    assert receive_bytes(network.transports[1], 0, limit=8000) == sent
    thread.join()


def test_damaged_bytes_and_bytes_beyond_the_limit_are_refused() -> None:
    network = MemoryNetwork(2)
    sender, receiver = network.transports
    sender.send(data(*(5).to_bytes(8, "little"), *bytes(8)), to=1, tag=3)
    with pytest.raises(TransportError, match="5 bytes, beyond the limit of 4"):
        receive_bytes(receiver, 0, tag=3, limit=4)
    header = (5).to_bytes(8, "little") + (1).to_bytes(8, "little")
    sender.send(data(*header), to=1, tag=0)
    sender.send(data(*b"12345"), to=1, tag=0)
    with pytest.raises(TransportError, match="damaged"):
        receive_bytes(receiver, 0, limit=5)


def test_nothing_is_allocated_for_an_announcement_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    network = MemoryNetwork(2)
    network.transports[0].send(data(*(2**31).to_bytes(8, "little"), *bytes(8)), to=1, tag=0)
    made: list[object] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **kind: made.append(size) or zeros(*size, **kind))  # type: ignore[func-returns-value]
    with pytest.raises(TransportError, match=r"2147483648 .* 65536"):
        receive_bytes(network.transports[1], 0, limit=WORD_BYTES)
    assert made == [(16 + 2**12,)]  # a header, and what travels with it


def test_receive_bytes_requires_a_limit() -> None:
    limit = inspect.signature(receive_bytes).parameters["limit"]
    assert limit.default is inspect.Parameter.empty


def test_tensors_arrive_with_their_strides() -> None:
    network = MemoryNetwork(2)
    sent = torch.arange(6.0).reshape(2, 3).t()
    received = torch.zeros(3, 2)
    thread = threading.Thread(target=send_tensor, args=(network.transports[0], sent, 1))
    thread.start()
    receive_tensor(network.transports[1], received, 0)
    thread.join()
    assert torch.equal(sent, received)
    send_tensor(network.transports[0], torch.zeros(0), 1)
    assert network.num_open() == 0


class Held:
    """Something with a descriptor, such as a listening socket."""


def test_abandoned_call_releases_memory_without_gc() -> None:
    held, goes_on = Held(), threading.Event()
    still_there = weakref.ref(held)

    def connect(held: Held = held) -> None:
        goes_on.wait(10)
        raise RuntimeError(f"{held} has no peer")

    def watch() -> None:
        raise RunError("worker 1 is gone")

    gc.disable()
    try:
        try:
            run_watched(connect, watch, 10.0)
        except RunError:  # pytest.raises would hold the frames
            pass
        else:
            pytest.fail("the reason was not raised")
        del held, connect
        goes_on.set()
        until(lambda: still_there() is None)
    finally:
        gc.enable()
