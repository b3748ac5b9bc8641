"""Cut sets that take turns: other cuts for every microbatch, the same numbers."""

import random
from functools import partial

import pytest
import torch
from torch import nn

from penstock.deploy.deployment import Deployment, deploy_pipeline
from penstock.deploy.jobs import FromWeights
from penstock.deploy.policies import divide_by_sets
from penstock.deploy.run_options import RunOptions
from penstock.deploy.state import load_state
from penstock.engine.channels import RemoteReceiver, RemoteSender
from penstock.errors import TransportError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts, divide
from penstock.graph.program import StageProgram, states_of
from penstock.transport.memory_network import MemoryNetwork
from penstock.transport.messages import DATA, Format, Message
from penstock.values import Size, Value
from penstock.zoo.weights.weights import ModuleWeights
from tests.fewer import first
from tests.models import deit, gpt2
from tests.worlds import memory_world

ROWS = 2


@pytest.mark.parametrize("build", [deit, gpt2])
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_alternating_cuts_give_the_same_numbers(build: object, seed: int) -> None:
    torch.manual_seed(seed)
    model: nn.Module = build()  # type: ignore[operator]
    images = build is deit

    def batch(rows: int) -> torch.Tensor:
        return torch.randn(rows, 3, 32, 32) if images else torch.randint(0, 80, (rows, 9))

    graph = capture(model, (batch(ROWS),))
    cuts, chance = list(Cuts(graph)), random.Random(seed)
    sets = [sorted(chance.sample(cuts, 2), key=lambda cut: cut.position) for _ in range(3)]
    order = [chance.randrange(3) for _ in range(5)]
    inputs = [batch(chance.randint(1, ROWS)) for _ in range(12)]
    whole = divide_by_sets(graph, [[]])
    load = partial(load_state, graph, weights=ModuleWeights(model))
    microbatches = [([x], {"batch": len(x)}) for x in inputs]

    def run(programs: list[tuple[StageProgram, ...]], order: list[int]) -> list[list[torch.Tensor]]:
        with memory_world(len(programs)) as world:
            pipeline = deploy_pipeline(
                world.feeder, programs, FromWeights(load), RunOptions(threads=1), sizes={"batch": ROWS}, order=order
            )
            deployment = Deployment(world.feeder, [pipeline])
            # twice: every stream begins with the first turn
            results = [list(deployment.stream(microbatches)) for _ in range(2)]
            deployment.close()
        return results[0] + results[1]

    expected, given_ = run(whole, [0]), run(divide_by_sets(graph, sets), order)
    assert len(given_) == 24
    for one, other in zip(expected, given_, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_weights_that_programs_share_are_held_once() -> None:
    model = deit()
    graph = capture(model, (torch.randn(1, 3, 32, 32),))
    cuts = list(Cuts(graph))
    near = [cuts[len(cuts) // 2 - 3], cuts[len(cuts) // 2 + 3]]
    first, second = divide_by_sets(graph, [[cut] for cut in near])
    for turns in (first, second):
        names = [state.value.name for state in states_of(turns)]
        assert len(names) == len(set(names))
        assert set(names) == {state.value.name for program in turns for state in program.states}
    held = sum(len(states_of(turns)) for turns in (first, second))
    assert len(divide(graph, [])[0].states) <= held < 2 * len(divide(graph, [])[0].states)


def test_a_message_of_another_program_is_noticed() -> None:
    narrow, wide = (Format([Value("x", torch.float32, (Size("batch"), n))], ["batch"], {"batch": 3}) for n in (4, 64))
    num_bytes = wide.largest({"batch": 2})

    def passed(sent: Message, here: list[Format], there: list[Format]) -> Message:
        network = MemoryNetwork(2)
        receiver = RemoteReceiver(network.transports[1], 0, 5, there, num_bytes, 1)
        RemoteSender(network.transports[0], 1, 5, here, num_bytes, 1).put(sent)
        return receiver.take()

    for index, (program, width) in enumerate([(0, 4), (1, 64), (0, 4)]):
        x = torch.randn(2, width)
        read = passed(Message(DATA, index, (2,), [x], program=program), [narrow, wide], [narrow, wide])
        assert read.program == program
        assert torch.equal(read.tensors[0], x)
    with pytest.raises(TransportError, match="too short"):
        passed(Message(DATA, 0, (2,), [torch.randn(2, 4)]), [narrow, wide], [wide, narrow])
    with pytest.raises(TransportError, match="program 1"):
        passed(Message(DATA, 0, (2,), [torch.randn(2, 64)], program=1), [narrow, wide], [wide])


@pytest.mark.parametrize("order", [(0, 1), (0, 0, 1), (1, 0, 0, 0, 1)])
def test_pipelines_side_by_side_give_results_in_order(order: tuple[int, ...]) -> None:
    model = deit()
    graph = capture(model, (torch.randn(ROWS, 3, 32, 32),))
    cuts = list(Cuts(graph))
    load = partial(load_state, graph, weights=ModuleWeights(model))
    inputs = [torch.randn(1 + index % ROWS, 3, 32, 32) for index in range(15)]
    with memory_world(3) as world:
        pipelines = [
            deploy_pipeline(
                world.feeder, divide_by_sets(graph, [chosen]), FromWeights(load), RunOptions(threads=1),
                sizes={"batch": ROWS}, ranks=ranks,
                number=number,
            )
            for number, (chosen, ranks) in enumerate([([cuts[len(cuts) // 2]], [1, 2]), ([], [3])])
        ]  # fmt: skip
        replicas = Deployment(world.feeder, pipelines, order)
        for _ in range(2):
            results = list(replicas.stream([([x], {"batch": len(x)}) for x in inputs]))
            assert len(results) == len(inputs)
            with torch.no_grad():
                for x, (result,) in zip(inputs, results, strict=True):
                    assert torch.equal(result, model(x))
            assert sum(stage.num_microbatches for stage in replicas.last_report.stages if stage.stage == 0) == 15
        left = replicas.stream([([x], {"batch": len(x)}) for x in inputs])
        next(left)
        left.close()  # leaving early drains both
        assert len(list(replicas.stream([([inputs[0]], {"batch": 1})]))) == 1
        replicas.close()
