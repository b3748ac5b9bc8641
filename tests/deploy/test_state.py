"""Tensors that move between ranks: those that are wanted come, in order, as they were, however many at once."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.deploy.state import Held, Wanted, redistribute
from penstock.errors import TransportError
from penstock.transport.base import STATE, Transport
from penstock.transport.faulty import Fault, FaultyTransport
from penstock.transport.memory_network import MemoryNetwork
from tests.fewer import examples
from tests.trainers import on_each_rank

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
SHAPES = ((), (0,), (1,), (3, 2), (2, 0, 3), (33,))
Ranks = dict[str, list[int]]
IN_FLIGHT = (1, 3, 100)


def tensor_of(number: int) -> Tensor:
    shape, dtype = SHAPES[number % len(SHAPES)], DTYPES[number % len(DTYPES)]
    made = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 10
    return (made > 0) if dtype == torch.bool else made.to(dtype)


def on_threads(network: MemoryNetwork, act: Callable[[Transport], Any], *faults: Fault) -> list[Any]:
    """What each rank returns, or the error that it ended with."""
    return on_each_rank(len(network.transports), lambda rank: act(FaultyTransport(network.transports[rank], faults)))


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, Ranks, Ranks]:
    size = draw(st.integers(1, 4))
    names = [f"t{number}" for number in range(draw(st.integers(0, 12)))]

    def ranks(least: int) -> list[int]:
        return list(draw(st.permutations(range(size))))[: draw(st.integers(least, size))]

    have = {name: ranks(1) for name in names}
    order = draw(st.permutations(names))
    return size, have, {name: ranks(0) for name in order if draw(st.integers(0, 4))}


def move(network: MemoryNetwork, have: Ranks, want: Ranks, in_flight: int) -> tuple[list[Any], list[list[str]]]:
    """What each rank has of it, and the names of what it read for that."""
    loaded: list[list[str]] = [[] for _ in network.transports]

    def act(transport: Transport) -> list[tuple[str, Tensor]]:
        def load(name: str) -> Tensor:
            assert transport.rank in have[name]
            loaded[transport.rank].append(name)
            return tensor_of(int(name[1:]))

        def room(name: str) -> Tensor:
            assert transport.rank in want[name]
            assert transport.rank not in have[name]
            return torch.full_like(tensor_of(int(name[1:])), 1)

        return list(redistribute(Held(have, load), Wanted(want, room), transport, STATE, in_flight=in_flight))

    return on_threads(network, act), loaded


@settings(max_examples=examples(60))
@given(moves())
def test_requested_tensors_arrive_in_order(moving: tuple[int, Ranks, Ranks]) -> None:
    size, have, want = moving
    for in_flight in IN_FLIGHT:
        network = MemoryNetwork(size)
        results, loaded = move(network, have, want, in_flight)
        for rank, found in enumerate(results):
            assert [name for name, _ in found] == [name for name, ranks in want.items() if rank in ranks]
            for name, tensor in found:
                assert tensor.dtype == tensor_of(int(name[1:])).dtype
                assert torch.equal(tensor, tensor_of(int(name[1:]))), name
            kept = {name for name, ranks in want.items() if rank in have[name] and rank in ranks}
            sent = {name for name, ranks in want.items() if rank == have[name][0] and set(ranks) - {*have[name]}}
            assert sorted(loaded[rank]) == sorted(kept | sent), "something is read that is not needed, or twice"
        assert network.num_open() == 0


def test_requested_tensors_are_in_flight_together() -> None:
    """A sender posts as many as may be in flight before the first has gone; the next only when it has."""
    for in_flight in IN_FLIGHT:
        network, names = MemoryNetwork(2), [f"t{number}" for number in range(5)]
        posted: list[str] = []

        def load(name: str, posted: list[str] = posted) -> Tensor:
            posted.append(name)
            return torch.ones(4)

        have, want = (
            Held(dict.fromkeys(names, (0,)), load),
            Wanted(dict.fromkeys(names, (1,)), lambda _: torch.empty(4)),
        )
        transport = network.transports[0]
        sender = threading.Thread(
            target=lambda h=have, w=want, t=transport, n=in_flight: list(redistribute(h, w, t, STATE, in_flight=n)),
            daemon=True,
        )
        sender.start()
        sender.join(0.2)
        assert posted == names[:in_flight]
        found = [tensor for _, tensor in redistribute(have, want, network.transports[1], STATE, in_flight=in_flight)]
        sender.join(5.0)
        assert not sender.is_alive()
        assert posted == names
        assert all(torch.equal(tensor, torch.ones(4)) for tensor in found)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("message", [0, 3, 6])
def test_damaged_tensor_is_reported(in_flight: int, message: int) -> None:
    names = [f"t{number}" for number in range(7)]

    def act(transport: Transport) -> int:
        have = Held(dict.fromkeys(names, (0,)), lambda name: torch.full((5,), float(name[1:])))
        want = Wanted(dict.fromkeys(names, (0, 1, 2)), lambda _: torch.empty(5))
        return len(list(redistribute(have, want, transport, STATE, in_flight=in_flight)))

    fault = Fault(kind="corrupt", rank=0, message=2 * message, tag=STATE, seed=message)
    first, hit, spared = on_threads(MemoryNetwork(3), act, fault)
    assert isinstance(hit, TransportError)
    assert "arrived damaged" in str(hit)
    assert [first, spared] == [7, 7]
