"""A pipeline in place, with threads as workers: order, bounds, ends, and messages lost for good; a plan's devices."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock.deploy.deployment import Deployment, places_in_line, ranks_of
from penstock.deploy.jobs import FromWeights, send_stages
from penstock.deploy.state import load_state
from penstock.engine.channels import LocalChannel
from penstock.engine.driver import Microbatch
from penstock.engine.job import StagesJob
from penstock.errors import ConnectionBroken, PenstockError, PlanError, RunError, UsageError
from penstock.graph.capture import capture
from penstock.graph.ops import State
from penstock.group.world import assign_stages
from penstock.transport.faulty import Fault
from penstock.transport.messages import DATA, Message
from penstock.zoo.weights.weights import ModuleWeights
from tests.worlds import Divided, divided_tower, memory_world, poison, tower_inputs


@pytest.fixture(scope="module")
def thirds() -> Divided:
    return divided_tower(3)


def fed(inputs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Microbatch]:
    for x, rows in inputs:
        yield [x, rows], {"batch": len(x)}


def expected(divided: Divided, inputs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    with torch.no_grad():
        return [divided.model(*microbatch) for microbatch in inputs]


def slowly(stream: Iterator[list[Tensor]]) -> Iterator[list[Tensor]]:
    for tensors in stream:
        yield tensors
        time.sleep(0.05)


def check(divided: Divided, deployment: Deployment, inputs: Sequence[tuple[Tensor, Tensor]]) -> None:
    results = [tensors[0] for tensors in deployment.stream(fed(inputs))]
    assert len(results) == len(inputs)
    assert all(torch.equal(a, b) for a, b in zip(results, expected(divided, inputs), strict=True))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [0, 1, 40])
def test_streams_one_after_the_other(thirds: Divided, num_workers: int, num_microbatches: int) -> None:
    with memory_world(num_workers) as world:
        deployment = thirds.deploy(world.feeder)
        for _ in range(2):
            check(thirds, deployment, [*tower_inputs(num_microbatches), *tower_inputs(1, batch=1)])
            report = deployment.last_report
            assert report.num_microbatches == num_microbatches + 1
            assert [stage.num_microbatches for stage in report.stages] == [num_microbatches + 1] * 3
        deployment.close()
    assert not world.errors
    assert world.network.num_open() == 0


def test_one_deployment_after_the_other_on_the_same_world(thirds: Divided) -> None:
    with memory_world(2) as world:
        for number in (1, 2):
            deployment = thirds.deploy(world.feeder, number=number)
            check(thirds, deployment, tower_inputs(3))
            deployment.close()


def test_an_interrupt_in_the_middle_of_a_hand_over_ends_the_stream(
    thirds: Divided, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = LocalChannel.offer

    def interrupted(edge: LocalChannel, message: Message, timeout_s: float) -> bool:
        if message.kind == DATA and message.index == 9:
            edge._places.get()  # the place is taken, and nobody will ever give it back
            raise KeyboardInterrupt
        return place(edge, message, timeout_s)

    with memory_world(2) as world:
        deployment = thirds.deploy(world.feeder)
        monkeypatch.setattr(LocalChannel, "offer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(deployment.stream(fed(tower_inputs(30))))
        with pytest.raises(RunError, match="KeyboardInterrupt"):
            check(thirds, deployment, tower_inputs(3))
        deployment.close()


def test_closing_cancels_a_stream_under_way(thirds: Divided) -> None:
    with memory_world(3) as world:
        deployment = thirds.deploy(world.feeder)
        stream = deployment.stream(fed(tower_inputs(40)))
        next(stream)
        deployment.close()
        with pytest.raises(UsageError, match="closed during this stream"):
            list(stream)
    assert not world.errors


def test_a_result_does_not_wait_until_the_pipeline_is_full(thirds: Divided) -> None:
    pulled = []

    def slow_source() -> Iterator[Microbatch]:
        for number, microbatch in enumerate(fed(tower_inputs(8))):
            pulled.append(number)
            time.sleep(0.2)
            yield microbatch

    with memory_world(3) as world:
        deployment = thirds.deploy(world.feeder)
        stream = deployment.stream(slow_source())
        next(stream)
        assert len(pulled) < 8
        assert len(list(stream)) == 7
        deployment.close()


def test_a_slow_consumer_bounds_what_is_pulled(thirds: Divided) -> None:
    pulled = 0

    def counting() -> Iterator[Microbatch]:
        nonlocal pulled
        for microbatch in fed(tower_inputs(200)):
            pulled += 1
            yield microbatch

    with memory_world(3) as world:
        deployment = thirds.deploy(world.feeder, depth=2)
        stream = deployment.stream(counting())
        next(stream)
        time.sleep(0.2)
        window = (2 + 1) * 3 + 2
        assert pulled <= window
        next(stream)
        time.sleep(0.1)
        assert pulled <= window + 1
        stream.close()
        deployment.close()


def test_a_failing_operation_names_device_stage_and_microbatch(thirds: Divided) -> None:
    inputs = tower_inputs(20)
    inputs[7] = poison(inputs[7], 5)
    results: list[Tensor] = []
    with memory_world(3) as world:
        deployment = thirds.deploy(world.feeder)
        with pytest.raises(RunError, match=r"worker 3: stage 2, microbatch 7: operation embedding.* \(stage 2\)"):
            results.extend(tensors[0] for tensors in deployment.stream(fed(inputs)))
        deployment.close()
    assert len(results) <= 7
    assert all(torch.equal(a, b) for a, b in zip(results, expected(thirds, inputs[:7]), strict=False))
    assert len(world.errors) == 3


# a fault at the outlet of each rank; the feeder sends 6 microbatches and the end, then the word to stop
@pytest.mark.parametrize(
    ("fault", "stall"),
    [
        (Fault(kind="drop", rank=0, message=5), None),
        (Fault(kind="drop", rank=1, message=2), None),
        (Fault(kind="drop", rank=3, message=5), None),
        (Fault(kind="drop", rank=0, message=6), "stage 0 on worker 1 has waited 0.3 s for activations 7 of 7"),
        (Fault(kind="drop", rank=2, message=6), "stage 2 on worker 3 has waited 0.3 s for activations 7 of 7"),
        (Fault(kind="drop", rank=3, message=6), "the driver has waited 0.3 s for activations 7 of 7"),
    ],
    ids=lambda value: f"{value.kind}-{value.rank}-{value.message}" if isinstance(value, Fault) else "",
)
def test_a_lost_message_never_hangs(thirds: Divided, fault: Fault, stall: str | None) -> None:
    with memory_world(3, [fault]) as world:
        deployment = thirds.deploy(world.feeder, stall_s=0.3)
        begin = time.perf_counter()
        with pytest.raises(RunError) as caught:
            list(deployment.stream(fed(tower_inputs(6))))
        assert time.perf_counter() - begin < 3.0
        assert (stall or "was lost or repeated") in str(caught.value)
        deployment.close()


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_lost_last_microbatch_is_detected_at_the_end(thirds: Divided, rank: int) -> None:
    with memory_world(3, [Fault(kind="drop", rank=rank, message=5)]) as world:
        deployment = thirds.deploy(world.feeder)
        with pytest.raises(RunError, match=r"(microbatch|result) 5.* end of a stream of 6"):
            list(deployment.stream(fed(tower_inputs(6))))
        deployment.close()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_lost_close_message_never_hangs(thirds: Divided, rank: int) -> None:
    with memory_world(3, [Fault(kind="drop", rank=rank, message=8)]) as world:
        deployment = thirds.deploy(world.feeder, stall_s=0.3)
        check(thirds, deployment, tower_inputs(6))
        with pytest.raises(RunError):
            deployment.close()


@pytest.mark.parametrize("message", range(8))
def test_damage_and_loss_of_programs_and_weights(thirds: Divided, message: int) -> None:
    """The control tag: header, document, weights; each damaged, then lost."""
    for kind in ("corrupt", "drop"):
        fault = Fault(kind=kind, rank=0, message=message, tag=0, seed=message)
        with memory_world(1, [fault], reason_s=0.5) as world:
            with pytest.raises(PenstockError):
                list(thirds.deploy(world.feeder, stall_s=0.3).stream(fed(tower_inputs(3))))
            world.feeder.transport.abort()


def test_slow_work_is_not_a_stall(thirds: Divided) -> None:
    def slow_source() -> Iterator[Microbatch]:
        for microbatch in fed(tower_inputs(2)):
            time.sleep(0.4)
            yield microbatch

    with memory_world(3, [Fault(kind="delay", rank=2, message=1, delay_s=0.15)]) as world:
        deployment = thirds.deploy(world.feeder, stall_s=0.3)
        for _ in deployment.stream(slow_source()):
            time.sleep(0.4)
        deployment.close()


def test_a_slow_stage_is_not_a_stall(thirds: Divided, monkeypatch: pytest.MonkeyPatch) -> None:
    run = thirds.programs[1][0]

    def slow(self: object, *arguments: object) -> object:
        if self.program == run:  # type: ignore[attr-defined]
            time.sleep(0.5)
        return original(self, *arguments)

    original = __import__("penstock.runtime.eager", fromlist=["Runtime"]).Runtime.__call__
    monkeypatch.setattr("penstock.runtime.eager.Runtime.__call__", slow)
    with memory_world(3) as world:
        deployment = thirds.deploy(world.feeder, stall_s=0.2)
        check(thirds, deployment, tower_inputs(2))
        deployment.close()


def test_a_silent_worker_is_named_with_its_stage(thirds: Divided) -> None:
    with memory_world(3, silence_s=0.3) as world:
        deployment = thirds.deploy(world.feeder)
        stream = deployment.stream(fed(tower_inputs(200)))
        next(stream)
        health = world.workers[1].health
        health._stop.set()
        health._thread.join()
        with pytest.raises(RunError, match=r"worker 2 .*\(stage 1\)"):
            list(slowly(stream))
        deployment.close()
        world.network.transports[2].abort()


def test_driver_can_hold_stages(thirds: Divided) -> None:
    """As under torchrun, where the first process holds stages too."""
    threads = torch.get_num_threads()
    with memory_world(1) as world:
        world.feeder.devices = [0, 1]
        deployment = thirds.deploy(world.feeder)
        assert deployment.pipelines[0].job.ranks == (0, 0, 1)
        check(thirds, deployment, tower_inputs(20))
        deployment.close()
    inputs = tower_inputs(9)
    inputs[4] = poison(inputs[4], 0)
    with memory_world(1) as world:
        world.feeder.devices = [0, 1]
        deployment = thirds.deploy(world.feeder)
        with pytest.raises(RunError, match="stage 0, microbatch 4"):
            list(deployment.stream(fed(inputs)))
        deployment.close()
    with memory_world(1, [Fault(kind="corrupt", rank=1, message=3)]) as world:
        world.feeder.devices = [1, 0]  # the first stage elsewhere, the others here
        deployment = thirds.deploy(world.feeder)
        with pytest.raises(RunError, match=r"stage 2, microbatch 3: .* 3 is damaged"):
            list(deployment.stream(fed(tower_inputs(9))))
        deployment.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("devices", [[0], [1]])
def test_a_model_that_is_changed_later_changes_no_results(devices: list[int]) -> None:
    divided = divided_tower(1)
    with memory_world(1) as world:
        world.feeder.devices = devices
        deployment = divided.deploy(world.feeder)
        expected = [deployed[0].clone() for deployed in deployment.stream(fed(tower_inputs(2)))]
        with torch.no_grad():
            for parameter in divided.model.parameters():
                parameter.add_(1.0)
        again = [deployed[0] for deployed in deployment.stream(fed(tower_inputs(2)))]
        assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
        deployment.close()


def test_weights_are_loaded_one_at_a_time(thirds: Divided) -> None:
    alive: list[int] = []
    lock = threading.Lock()
    current = 0

    class Counted(Tensor):
        def __del__(self) -> None:
            nonlocal current
            with lock:
                current -= 1

    weights = ModuleWeights(thirds.model)

    def load(state: State) -> Tensor:
        nonlocal current
        with lock:
            current += 1
            alive.append(current)
        return load_state(thirds.graph, state, weights).clone().as_subclass(Counted)

    with memory_world(3) as world:
        job = StagesJob(number=0, ranks=(1, 2, 3), sizes={"batch": 2}, device_names=tuple(world.feeder.names))
        send_stages(world.feeder.transport, job, thirds.programs, FromWeights(load))
        world.feeder.transport.abort()
        for worker in world.workers:
            worker.transport.abort()
    assert len(alive) == sum(len(program.states) for turns in thirds.programs for program in turns)
    assert max(alive) == 1


def test_stages_are_placed_in_groups_as_even_as_can_be() -> None:
    with memory_world(4) as world:
        assert assign_stages(world.feeder, 6) == [1, 1, 2, 2, 3, 4]
        assert assign_stages(world.feeder, 2) == [1, 2]
        with pytest.raises(UsageError, match="at least 1"):
            assign_stages(world.feeder, 0)


def test_a_deployment_on_a_broken_world_says_why(thirds: Divided) -> None:
    with memory_world(2) as world:
        world.workers[0].health.report(ValueError("no disk"))
        time.sleep(0.1)
        with pytest.raises(RunError, match="worker 1: no disk") as caught:
            thirds.deploy(world.feeder)
        assert not isinstance(caught.value, ConnectionBroken)


def test_operators_that_differ_between_torch_versions_are_refused(thirds: Divided) -> None:
    """Before anything is sent; one that no stage there calls is no reason."""
    inputs = tower_inputs(2)
    with memory_world(3) as world:
        world.feeder.unlike = {2: frozenset({"aten.linear.default"}), 1: frozenset({"aten.gelu.default"})}
        with pytest.raises(RunError) as refused:
            thirds.deploy(world.feeder)
        assert "aten.linear.default" in str(refused.value)
        assert world.feeder.names[2] in str(refused.value)
        world.feeder.unlike = {2: frozenset({"aten.gelu.default"})}
        deployment = thirds.deploy(world.feeder)
        check(thirds, deployment, inputs)
        deployment.close()


def test_processes_of_one_host_are_numbered_from_the_second_on() -> None:
    hosts = ["the feeding process", "desk", "board", "desk", "desk"]
    with memory_world(4) as made:
        world = replace(made.feeder, hosts=hosts)
        assert ranks_of(world, ["board", "desk:2", "desk"]) == {"board": 2, "desk:2": 4, "desk": 1}
        with pytest.raises(PlanError, match=r"board:1, .*desk, board, desk:1, desk:2"):
            ranks_of(world, ["board", "board:1"])


class Repeats(nn.Module):
    """Its output has so many times the rows of its input."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
        self.times = times

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(rows)
        return hidden.repeat(1, self.times)


@pytest.mark.parametrize(("times", "wanted"), [(1, [[0, 0, 1, 2], [0, 1]]), (2, [[1, 2, 0, 0], [1, 0]])])
def test_the_driver_has_the_stage_whose_messages_are_larger(times: int, wanted: list[list[int]]) -> None:
    graph = capture(Repeats(times), (torch.zeros(1, 6),))
    with memory_world(2) as made:
        world = replace(made.feeder, devices=[0, 1, 2])
        assert [places_in_line(world, graph, stages) for stages in (4, 2)] == wanted
        # a driver that has no stage
        assert places_in_line(made.feeder, graph, 2) == [1, 2]
