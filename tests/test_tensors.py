"""Devices by name, tensors moved between them, and streams through stages that compute elsewhere than on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.deploy.deployment import Deployment, deploy_pipeline
from penstock.deploy.jobs import FromWeights
from penstock.deploy.policies import choose_cuts, divide_by_sets
from penstock.deploy.run_options import RunOptions
from penstock.deploy.state import load_state
from penstock.errors import RunError, UsageError
from penstock.graph.call import bind_inputs
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, divide
from penstock.graph.program import read_program, write_program
from penstock.measure.costs import Timing
from penstock.measure.profiler import measure_runtimes
from penstock.runtime.eager import Runtime
from penstock.runtime.registry import EAGER, RUNTIMES, RuntimeChoice
from penstock.tensors import HOST, find_device, moved, num_payload_bytes, pack, unpack
from penstock.zoo.weights.weights import ModuleWeights
from tests import pretend
from tests.models import UNet, bert, seeded
from tests.worlds import MemoryWorld, divided_tower, memory_world, tower_inputs

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "meta", "", "mps"])
def test_an_unknown_device_is_one_line(name: str) -> None:
    with pytest.raises(UsageError, match=r"must be cpu, cuda or cuda:N; got '.*'; give") as caught:
        find_device(name)
    assert "\n" not in str(caught.value)


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_one_line(name: Any) -> None:
    with pytest.raises(UsageError, match=r"'cuda.*' is a GPU") as caught:
        find_device(name)
    assert "\n" not in str(caught.value)


def test_processes_of_a_machine_share_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [find_device("cuda", position).index for position in range(4)] == [0, 1, 0, 1]
    assert [find_device("cuda:1", position).index for position in range(2)] == [1, 1]
    assert find_device("cpu", 3) == HOST
    with pytest.raises(UsageError, match=r"cuda:2 not found: .* cuda:1"):
        find_device("cuda:2")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(3, 0, 2).transpose(0, 2),
        torch.arange(3.0).expand(4, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.arange(24.0).reshape(2, 3, 4)[:, 1:, ::2],
        torch.arange(10.0).unfold(0, 4, 1),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{list(tensor.shape)}-{tensor.stride()}",
)
def test_a_tensor_keeps_its_strides_wherever_it_goes(tensor: Tensor, pretended: torch.device) -> None:
    there = moved(tensor, pretended)
    back = moved(there, HOST)
    assert there.device == pretended
    assert there.stride() == back.stride() == tensor.stride()
    assert torch.equal(back, tensor)
    assert moved(there, pretended) is there
    assert moved(tensor, HOST) is tensor
    again = moved(torch.zeros(2, device="meta"), pretended)
    assert again.device.type == "meta"
    layout = tensor.shape, tensor.stride()
    buffer = torch.empty(num_payload_bytes(*layout, tensor.itemsize), dtype=torch.uint8)
    pack(tensor, buffer)
    unpacked = unpack(buffer, tensor.dtype, *layout)
    assert unpacked.stride() == tensor.stride()
    assert torch.equal(unpacked, tensor)


class Makes(nn.Module):
    """Makes tensors of nothing, in each of the ways there are."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.constant = torch.arange(4.0).expand(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        mask = torch.ones(rows, 4, device=x.device).tril() + torch.zeros(4)
        order = torch.arange(rows * 4, dtype=x.dtype).view(rows, 4)
        told = torch.full((4,), 0.5, device="cpu").to(x.device) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        result: Tensor = x * mask + order * self.scale + torch.eye(4)[0] + told + self.constant[1]
        return result + torch.scalar_tensor(3.0) + torch.linspace(0, 1, 4)


def test_everything_a_program_makes_lies_on_the_stages_device(pretended: torch.device) -> None:
    model, x = Makes().eval(), torch.randn(3, 4)
    graph = capture(model, (x,))
    weights = ModuleWeights(model)
    program = read_program(write_program(divide(graph, [])[0]))
    # as an operator's own defaults leave it out
    bare = [{key: v for key, v in op.keywords.items() if key != "device"} for op in (*program.prelude, *program.ops)]
    for op, keywords in zip((*program.prelude, *program.ops), bare, strict=True):
        object.__setattr__(op, "keywords", keywords)
    runtime = Runtime(program, {s.value.name: load_state(graph, s, weights) for s in program.states}, pretended)
    bound = runtime.bind({"batch": 3})
    assert {t.device for t in bound.registers if isinstance(t, Tensor)} == {pretended}
    (output,) = runtime({"batch": 3}, [x.to(pretended)])
    assert output.device == pretended
    assert torch.equal(output.cpu(), model(x))


MODELS: dict[str, Any] = {
    "bert": (bert, {"input_ids": torch.arange(18).view(2, 9), "attention_mask": torch.ones(2, 9).tril().long()}),
    "unet": (lambda: seeded(UNet), torch.randn(2, 3, 8, 8)),
}


@pytest.mark.usefixtures("one_thread")  # as the stages, since sums have other last bits with more
@pytest.mark.parametrize(("name", "processes"), [("bert", 2), ("unet", 2), ("unet", 1)])
def test_streams_through_a_device_as_one_process_there(name: str, processes: int, pretended_gpu: torch.device) -> None:
    make, given = MODELS[name]
    model = make().eval()
    args, kwargs = ((), given) if isinstance(given, dict) else ((given,), {})
    graph = capture(model, args, kwargs)
    programs = divide_by_sets(graph, [choose_cuts(graph, Cuts(graph), stages=3)])
    weights = ModuleWeights(model)
    whole, largest = bind_inputs(graph, args, kwargs)
    settled = pretend.module.num_settled
    # the second of two devices has two stages, so one cut lies within a process
    with memory_world(processes) as world:
        pipeline = deploy_pipeline(
            world.feeder, programs, FromWeights(lambda state: load_state(graph, state, weights)),
            RunOptions(threads=1, device=pretend.NAME), sizes=largest,
        )  # fmt: skip
        deployment = Deployment(world.feeder, [pipeline])
        fed = [(whole, largest), ([tensor[:1] for tensor in whole], {**largest, "batch": 1})] * 2
        results = list(deployment.stream(fed))
        deployment.close()
    program = divide(graph, [])[0]
    alone = Runtime(program, {s.value.name: load_state(graph, s, weights) for s in program.states}, pretended_gpu)
    for (inputs, sizes), outputs in zip(fed, results, strict=True):
        with torch.no_grad():
            reference = model(**dict(zip(kwargs, inputs, strict=True))) if kwargs else model(*inputs)
            expected = alone(sizes, [tensor.to(pretended_gpu) for tensor in inputs])
        assert {output.device for output in outputs} == {HOST}
        assert all(torch.equal(a, b.cpu()) for a, b in zip(outputs, expected, strict=True))
        torch.testing.assert_close(outputs[0], reference[0] if kwargs else reference)
    assert {stage.memory_bytes for stage in deployment.last_report.stages} == {pretend.HELD_BYTES}
    assert all(stage.compute_s > 0 for stage in deployment.last_report.stages)
    assert pretend.module.num_settled == settled  # no stage waits for all that is queued on its device


@pytest.fixture
def cuda(pretended_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> RuntimeChoice:
    """The runtime of a GPU, which is the pretended one."""
    monkeypatch.setitem(RUNTIMES, "cuda", replace(RUNTIMES["cuda"], device=pretend.NAME))
    assert RuntimeChoice("cuda").place() == pretended_gpu
    return RuntimeChoice("cuda")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("on_gpu", [(1,), (0, 2)])
def test_stages_on_a_gpu_beside_those_on_the_cpu(cuda: RuntimeChoice, on_gpu: tuple[int, ...]) -> None:
    divided, inputs = divided_tower(3), tower_inputs(4)
    found = []
    for runtimes in ((), tuple(cuda if stage in on_gpu else EAGER for stage in range(3))):
        with memory_world(2) as world:
            deployment = divided.deploy(world.feeder, runtimes=runtimes)
            found.append(list(deployment.stream([(list(given), {"batch": 2}) for given in inputs])))
            held = [stage.memory_bytes == pretend.HELD_BYTES for stage in deployment.last_report.stages]
            deployment.close()
    assert held == [stage in on_gpu for stage in range(3)]
    assert all(torch.equal(a, b) for pair in zip(*found, strict=True) for a, b in zip(*pair, strict=True))


def test_a_gpu_is_a_column_of_a_profile(cuda: RuntimeChoice) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    graph = capture(model, (torch.randn(2, 8),))
    (column,) = measure_runtimes(
        graph, lambda state: load_state(graph, state, ModuleWeights(model)), [cuda], Timing((1, 2), 1, 1)
    )
    assert (column.name, column.error) == ("cuda", 0.0)
    assert min(column.forward_s) > 0


@no_gpu
@pytest.mark.usefixtures("pretended")
def test_a_worker_without_a_gpu_says_so() -> None:
    divided, inputs = divided_tower(2), list(tower_inputs(1)[0])

    def stream(world: MemoryWorld) -> None:
        deployment = divided.deploy(world.feeder, device="cuda")
        list(deployment.stream([(inputs, {"batch": 2})]))

    with memory_world(2) as world, pytest.raises(RunError, match=r"worker \d.*: .*'cuda' is a GPU"):
        stream(world)
