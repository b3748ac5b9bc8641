"""Tensors from device to device: who agrees on it, the same outputs, and no wait without an end."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import penstock
from penstock.deploy.deployment import Deployment
from penstock.deploy.state import load_state
from penstock.engine import wiring
from penstock.engine.wiring import why_not
from penstock.errors import ConnectionBroken, RunError, UsageError
from penstock.graph.cuts import divide
from penstock.runtime.eager import Runtime
from penstock.transport.base import Transport, device_tag, send_bytes
from penstock.transport.memory_network import MemoryNetwork
from penstock.transport.nccl import NcclTransport
from penstock.zoo.weights.weights import ModuleWeights
from tests import pretend
from tests.communicators import Communicators
from tests.worlds import Divided, divided_tower, memory_world, poison, tower_inputs

pytestmark = pytest.mark.usefixtures("one_thread", "pretended_gpu")


def _deploy(divided: Divided, world: Any) -> Deployment:
    return divided.deploy(world, device=pretend.NAME)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_stream_has_the_outputs_of_one_device(
    num_stages: int, pretended: torch.device, communicators: Communicators
) -> None:
    divided = divided_tower(num_stages)
    fed = [(list(inputs), {"batch": 2}) for inputs in tower_inputs(7)]
    fed += [([tensor[:1] for tensor in fed[0][0]], {"batch": 1})]  # the last one is ragged
    with memory_world(num_stages) as world:
        deployment = _deploy(divided, world.feeder)
        streams = [list(deployment.stream(fed)) for _ in range(2)]
        deployment.close()
    weights, program = ModuleWeights(divided.model), divide(divided.graph, [])[0]
    alone = Runtime(program, {s.value.name: load_state(divided.graph, s, weights) for s in program.states}, pretended)
    for results in streams:
        for (inputs, sizes), outputs in zip(fed, results, strict=True):
            expected = alone(sizes, [tensor.to(pretended) for tensor in inputs])
            assert all(torch.equal(a, b.cpu()) for a, b in zip(outputs, expected, strict=True))
    # each line once, with a byte that connects it and the tensors of every microbatch, and nothing of streams' ends
    assert [c.num_begun for c in communicators.made] == [1 + 2 * len(fed)] * 2 * (num_stages - 1)
    assert all(c.aborted for c in communicators.made)


def test_failure_on_one_device_ends_the_stream(communicators: Communicators) -> None:
    fed = [(list(inputs), {"batch": 2}) for inputs in tower_inputs(6)]
    fed[4] = (list(poison(tower_inputs(5)[4], 5)), {"batch": 2})

    def stream(world: Any) -> None:
        list(_deploy(divided_tower(3), world).stream(fed))

    with memory_world(3) as world, pytest.raises(RunError, match="stage 2, microbatch 4"):
        stream(world.feeder)
    assert communicators.made
    assert all(c.aborted for c in communicators.made)


def test_processes_that_share_a_gpu_go_by_the_host(communicators: Communicators) -> None:
    communicators.shared = True
    fed = [(list(inputs), {"batch": 2}) for inputs in tower_inputs(2)]
    with memory_world(2) as world:
        deployment = _deploy(divided_tower(2), world.feeder)
        assert len(list(deployment.stream(fed))) == 2
        deployment.close()
    assert not communicators.made


@pytest.mark.parametrize("late", [False, True])
def test_required_nccl_that_cannot_connect_is_one_line(
    late: bool, communicators: Communicators, monkeypatch: pytest.MonkeyPatch
) -> None:
    communicators.shared = True
    with memory_world(2) as world:
        world.feeder.between_gpus = "nccl"

        def send_after_the_end(transport: Transport, data: bytes, to: int) -> None:
            deadline = time.monotonic() + 10
            while to == 2 and world.network.gone.isdisjoint({0, 2}) and time.monotonic() < deadline:
                time.sleep(0.01)
            send_bytes(transport, data, to)

        if late:
            monkeypatch.setattr(wiring, "send_bytes", send_after_the_end)
        with pytest.raises(UsageError, match="worker 1 and worker 2 share one"):
            _deploy(divided_tower(2), world.feeder)
        world.feeder.health.report(RunError("the deployment failed"))


def test_reasons_against_nccl() -> None:
    one, same, other = ({"gpu": name, "nccl": "yes"} for name in ("GPU-1", "GPU-1", "GPU-2"))
    assert why_not({"rank 0": one, "rank 1": other}) == ""
    assert "rank 0 and rank 1 share one" in why_not({"rank 0": one, "rank 1": same})
    assert "rank 1 does not compute on a CUDA device" in why_not({"rank 0": one, "rank 1": {"gpu": "", "nccl": "yes"}})
    assert "the torch of rank 1 was built without" in why_not({"rank 0": one, "rank 1": {"gpu": "GPU-2", "nccl": ""}})


def test_unusable_backend_is_refused_before_the_start() -> None:
    model, x = torch.nn.Linear(2, 2).eval(), torch.zeros(2, 2)
    with pytest.raises(UsageError, match=r"between_gpus .* auto, host, nccl; got 'mpi'"):
        penstock.Pipeline(model, x, links=penstock.LinkOptions(between_gpus="mpi"))
    with pytest.raises(UsageError, match="NCCL needs CUDA, but stages compute on cpu"):
        penstock.Pipeline(model, x, links=penstock.LinkOptions(between_gpus="nccl"))


def _pair(communicators: Communicators) -> list[NcclTransport]:
    network, store = MemoryNetwork(2), HashStore()
    return [NcclTransport(host, store, "pair", communicators.connect) for host in network.transports]


def _together(*calls: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert not any(thread.is_alive() for thread in threads), "a wait has not ended"


@pytest.mark.parametrize("waiting", ["receiver", "sender"])
def test_abort_ends_an_unmatched_wait(waiting: str, pretended: torch.device) -> None:
    first, second = _pair(Communicators(lose=1))
    tag, begun = device_tag(7), threading.Barrier(3)
    errors: list[Exception] = []

    def send() -> None:
        first.send(torch.ones(64, dtype=torch.uint8, device=pretended), 1, tag).wait()
        pending = first.send(torch.ones(64, dtype=torch.uint8, device=pretended), 1, tag)
        begun.wait(20.0)
        _wait(pending.wait, errors)

    def receive() -> None:
        second.receive(torch.zeros(64, dtype=torch.uint8, device=pretended), 0, tag).wait()
        pending = second.receive(torch.zeros(64, dtype=torch.uint8, device=pretended), 0, tag)
        begun.wait(20.0)
        _wait(pending.wait, errors)

    def abort() -> None:
        begun.wait(20.0)
        (second if waiting == "receiver" else first).abort()

    _together(send, receive, abort)
    assert len(errors) == 2
    ended = second if waiting == "receiver" else first
    with pytest.raises(ConnectionBroken, match="rank 0 was aborted"):
        ended.send(torch.zeros(1, dtype=torch.uint8, device=pretended), 0, tag)
    first.close()
    second.close()


def _wait(wait: Callable[[], None], errors: list[Exception]) -> None:
    try:
        wait()
    except ConnectionBroken as error:
        errors.append(error)


@pytest.mark.timeout(40)
def test_abort_does_not_wait_for_a_new_communicator(pretended: torch.device) -> None:
    """Two threads want one line, whose other end never comes; what is made in the end is aborted by its maker."""
    begun, comes = threading.Event(), threading.Event()

    class Quiet:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    made = Quiet()

    def connect(_store: Any, _place: int) -> Any:
        begun.set()
        assert comes.wait(20.0)
        return made

    host = MemoryNetwork(2).transports[0]
    transport = NcclTransport(host, HashStore(), "late", connect)
    errors: list[Exception] = []

    def send() -> None:
        buffer = torch.ones(8, dtype=torch.uint8, device=pretended)
        _wait(lambda: transport.send(buffer, 1, device_tag(7)).wait(), errors)

    maker, other = (threading.Thread(target=send, daemon=True) for _ in range(2))
    maker.start()
    assert begun.wait(10.0)
    other.start()
    aborting = threading.Thread(target=transport.abort, daemon=True)
    aborting.start()
    aborting.join(5.0)
    waited = aborting.is_alive()
    other.join(5.0)
    waits = other.is_alive()
    comes.set()
    for thread in (maker, other, aborting):
        thread.join(10.0)
    assert not waited, "abort waits for the connection"
    assert not waits, "who waits for the maker is not told"
    assert made.aborted, "what was made after the abort is left open"
    assert [str(error) for error in errors] == ["the connection of devices to rank 1 was aborted"] * 2
