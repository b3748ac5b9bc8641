"""What messages cost in CPU time, measured over a small stage."""

import time
from functools import partial

import torch
from torch import Tensor, nn

from penstock.engine.deployment import Deployment
from penstock.engine.divide import divide_in_turns
from penstock.engine.jobs import dismiss
from penstock.engine.split import load_state
from penstock.engine.world import World, start_local
from penstock.graph.capture import capture
from penstock.measure.profile import MessageCosts
from penstock.zoo.weights import ModuleWeights

_FEW, _MANY = 16, 150_000  # numbers in a message: hardly any, and what a small ViT sends
_BYTES_PER_NUMBER = 4

# far from the numbers of a run's own jobs, whose channels these must not meet
_JOBS = 1_000_000


class _Stage(nn.Module):
    """Computes for some milliseconds, as stages do: messages find the caches full of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x[:, :_FEW].repeat(1, 1024 // _FEW).expand(64, -1)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden[:1, :_FEW]


class _Give(_Stage):
    """Sends much."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).repeat(1, _MANY // _FEW)


def measure_messages(world: World | None = None, *, num_microbatches: int = 150) -> MessageCosts:
    """Measure the CPU seconds of a stage per microbatch and per byte, and of the process that feeds it.

    What the stage's process takes beside its computing is laid to messages: the threads that move bytes, the
    executor, the heartbeat. Without a world a worker is started on this machine.

    Example:
        profile_graph(graph, load, messages=measure_messages())
    """
    own = world is None
    world = world or start_local(1)
    try:
        few = _run(world, _Stage(), _FEW, num_microbatches, number=_JOBS)
        take = _run(world, _Stage(), _MANY, num_microbatches, number=_JOBS + 1)
        give = _run(world, _Give(), _FEW, num_microbatches, number=_JOBS + 2)
        if own:
            dismiss(world)  # a worker that is only left waits for a while
    finally:
        if own:
            world.close()
    num_bytes = (_MANY - _FEW) * _BYTES_PER_NUMBER
    return MessageCosts(
        send_s_per_byte=max(0.0, give[0] - few[0]) / num_bytes,
        receive_s_per_byte=max(0.0, take[0] - few[0]) / num_bytes,
        stage_overhead_s=few[0],
        feed_s=few[1] / 2,
        result_s=few[1] / 2,
    )


def _run(world: World, model: nn.Module, width: int, num_microbatches: int, number: int) -> tuple[float, float]:
    """Give CPU seconds per microbatch: of the stage's process beside computing, and of this process."""
    example = torch.zeros(1, width)
    graph = capture(model, (example,))
    deployment = Deployment(
        world, divide_in_turns(graph, [[]]), partial(load_state, graph, weights=ModuleWeights(model)),
        sizes=graph.sizes(1), threads=1, ranks=[world.devices[-1]], number=number,
    )  # fmt: skip
    for counted in (False, True):
        begin = time.process_time()
        for _ in deployment.stream(([example], graph.sizes(1)) for _ in range(num_microbatches if counted else 10)):
            pass
        fed_s = (time.process_time() - begin) / num_microbatches
    stage = deployment.last_report.stages[0]
    deployment.close()
    return (stage.cpu_s - stage.compute_cpu_s) / stage.num_microbatches, fed_s
