"""Faults as data, and what they do."""

import time

import pytest
import torch

from penstock.errors import ConnectionBroken, UsageError
from penstock.transport.faulty import FAULTS_VARIABLE, Fault, FaultyTransport, read_faults, wrap_if_faulty, write_faults
from penstock.transport.memory_network import MemoryNetwork, MemoryTransport


def through(*faults: Fault, tags: tuple[int, ...] = (1, 1, 1)) -> tuple[MemoryNetwork, list[list[int]]]:
    """Send one message of three bytes for each tag; gives what arrives, on tag 1 only."""
    network = MemoryNetwork(2)
    transport = FaultyTransport(network.transports[0], faults)
    for index, tag in enumerate(tags):
        transport.send(torch.full((3,), index, dtype=torch.uint8), to=1, tag=tag)
    arrived = []
    while network.lanes[0, 1, 1].sends:
        buffer = torch.zeros(3, dtype=torch.uint8)
        network.transports[1].receive(buffer, source=0, tag=1).wait()
        arrived.append(buffer.tolist())
    return network, arrived


def test_no_fault_passes_everything() -> None:
    assert through()[1] == [[0] * 3, [1] * 3, [2] * 3]
    assert through(Fault(kind="drop", rank=1, message=0))[1] == [[0] * 3, [1] * 3, [2] * 3]


def test_drop_and_duplicate_change_the_number_of_messages() -> None:
    assert through(Fault(kind="drop", rank=0, message=1))[1] == [[0] * 3, [2] * 3]
    assert through(Fault(kind="duplicate", rank=0, message=1))[1] == [[0] * 3, [1] * 3, [1] * 3, [2] * 3]
    both = [Fault(kind="drop", rank=0, message=0), Fault(kind="drop", rank=0, message=2)]
    assert through(*both)[1] == [[1] * 3]


def test_corrupt_changes_one_byte_the_same_every_time() -> None:
    fault = Fault(kind="corrupt", rank=0, message=1, seed=5)
    arrived = through(fault)[1]
    assert sum(value != 1 for value in arrived[1]) == 1
    assert arrived == through(fault)[1]


def test_messages_are_counted_by_channel_and_control_is_spared() -> None:
    assert through(Fault(kind="drop", rank=0, message=0), tags=(0, 0, 1))[1] == []
    assert through(Fault(kind="drop", rank=0, message=1, tag=1), tags=(1, 2, 1))[1] == [[0] * 3]
    network, _ = through(Fault(kind="drop", rank=0, message=0, tag=0), tags=(0, 0, 1))
    assert len(network.lanes[0, 1, 0].sends) == 1


def test_delay_sends_later() -> None:
    begin = time.perf_counter()
    assert len(through(Fault(kind="delay", rank=0, message=1, delay_s=0.1))[1]) == 3
    assert time.perf_counter() - begin >= 0.1


def test_close_ends_all_connections() -> None:
    with pytest.raises(ConnectionBroken, match="rank 0 lost its connections"):
        through(Fault(kind="close", rank=0, message=1))


def test_faults_travel_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [Fault(kind="drop", rank=1, message=3), Fault(kind="delay", rank=2, message=0, tag=4, delay_s=2.0)]
    assert read_faults(write_faults(faults)) == faults
    transport = MemoryNetwork(2).transports[0]
    assert isinstance(wrap_if_faulty(transport), MemoryTransport)
    monkeypatch.setenv(FAULTS_VARIABLE, write_faults(faults))
    assert isinstance(wrap_if_faulty(transport), FaultyTransport)


@pytest.mark.parametrize(
    "text", ["", "[", "{}", '[{"kind": "explode", "rank": 1, "message": 0}]', '[{"kind": "drop"}]']
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=FAULTS_VARIABLE):
        read_faults(text)
