"""Measurements of a cluster: speeds of hosts, links, and the CPU time of messages."""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise

import torch
from torch import Tensor, nn

from penstock.deploy.deployment import Deployment, deploy_pipeline
from penstock.deploy.jobs import FromWeights
from penstock.deploy.policies import divide_by_sets
from penstock.deploy.run_options import RunOptions
from penstock.deploy.state import load_state
from penstock.deploy.worker import work
from penstock.engine.reference import calibrate
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.measure.costs import MessageCosts
from penstock.transport.base import WORD_BYTES, Transport, receive_bytes, receive_tensor, send_bytes, send_tensor
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER
from penstock.zoo.weights.weights import ModuleWeights

_FEW, _MANY = 16, 150_000  # elements of a message: almost none, and as many as a small ViT sends
_BYTES_PER_NUMBER = 4

# far from the job numbers of a run, so that no channels are shared
_JOBS = 1_000_000


class _Stage(nn.Module):
    """Computes for some milliseconds, as stages do, so that messages find the caches full of other data."""

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


@dataclass(frozen=True, slots=True)
class _Taken:
    """CPU seconds per microbatch, without computing, of the last stage's process and of the driver."""

    stage_s: float
    feeder_s: float


def measure_messages(world: World | None = None, *, num_microbatches: int = 100) -> MessageCosts:
    """Measure the CPU seconds that messages take, per microbatch and per byte, of a stage and of the driver.

    All CPU time of the stage's process except computing is attributed to messages: threads that move bytes, executor,
    heartbeats. A driver that holds a stage takes less than two separate processes. If there is no world, or no other
    device in it, a worker is started on this machine.

    Example:
        profile_graph(graph, load, messages=measure_messages())
    """
    if world is not None and list(world.devices) != [FEEDER]:
        return _measure(world, num_microbatches)
    with start_local(1, over_network=True) as own:
        return _measure(own, num_microbatches)


def _measure(world: World, num_microbatches: int) -> MessageCosts:
    there, number = world.devices[-1], itertools.count(_JOBS)

    def run(model: nn.Module, ranks: Sequence[int] = (there,), width: int = _FEW) -> _Taken:
        return _run(world, model, width, num_microbatches, ranks, next(number))

    apart, take, give = run(_Stage()), run(_Stage(), width=_MANY), run(_Give())
    input_here, all_here = run(nn.Sequential(_Stage(), _Stage()), (FEEDER, there)), run(_Stage(), (FEEDER,))
    num_bytes = (_MANY - _FEW) * _BYTES_PER_NUMBER
    both_s = apart.stage_s + apart.feeder_s
    own_input_s = min(max(0.0, both_s - input_here.feeder_s), both_s)
    return MessageCosts(
        send_s_per_byte=max(0.0, give.stage_s - apart.stage_s) / num_bytes,
        receive_s_per_byte=max(0.0, take.stage_s - apart.stage_s) / num_bytes,
        stage_overhead_s=apart.stage_s,
        feed_s=apart.feeder_s / 2,
        result_s=apart.feeder_s / 2,
        own_input_s=own_input_s,
        own_output_s=max(0.0, both_s - own_input_s - all_here.feeder_s),
    )


def _run(
    world: World, model: nn.Module, width: int, num_microbatches: int, ranks: Sequence[int], number: int
) -> _Taken:
    example = torch.zeros(1, width)
    graph = capture(model, (example,))
    cuts = Cuts(graph).find_all([f"{stage}:before" for stage in range(1, len(ranks))])
    pipeline = deploy_pipeline(
        world,
        divide_by_sets(graph, [cuts]),
        FromWeights(partial(load_state, graph, weights=ModuleWeights(model))),
        RunOptions(threads=1),
        sizes=graph.sizes(1),
        ranks=ranks,
        number=number,
    )
    deployment = Deployment(world, [pipeline])
    for counted in (False, True):
        begin = time.process_time()
        for _ in deployment.stream(([example], graph.sizes(1)) for _ in range(num_microbatches if counted else 10)):
            pass
        fed_s = time.process_time() - begin
    stages = deployment.last_report.stages
    deployment.close()
    computed_s = sum(stage.compute_cpu_s for stage, rank in zip(stages, ranks, strict=True) if rank == FEEDER)
    last = stages[-1]
    return _Taken((last.cpu_s - last.compute_cpu_s) / last.num_microbatches, (fed_s - computed_s) / num_microbatches)


_LINK_BYTES = 2 * 1024 * 1024
_PINGS = 15
# up to this many hosts, every pair is measured; beyond, only neighbours
_MOST_HOSTS_IN_PAIRS = 6


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A measured link from one rank to another."""

    source: int
    target: int
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class MeasuredHosts:
    """Measurements: seconds per calibration round of each rank, in parallel; links; costs of messages."""

    calibration_s: list[float]
    links: list[MeasuredLink]
    messages: MessageCosts


def measure_hosts(world: World, *, seconds: float = 2.0, threads: int = 1) -> MeasuredHosts | None:
    """Measure a world (a collective call); returns the results on the driver, None on other ranks.

    Example:
        with join_torchrun(followed=True) as world:
            measured = measure_hosts(world)

    Hosts are calibrated simultaneously, so that contention between them is included; links in sequence, in both
    directions.
    """
    transport = world.transport
    all_gather(transport, {})  # a barrier
    own_s = calibrate(seconds, threads=threads)
    calibration_s = [told["round_s"] for told in all_gather(transport, {"round_s": own_s})]
    links = []
    for source, target in _pairs(transport.size):
        all_gather(transport, {})
        seen = _measure_link(transport, source, target) if transport.rank in {source, target} else None
        links.append(MeasuredLink(source, target, *all_gather(transport, {"seen": seen})[source]["seen"]))
    if transport.rank != FEEDER:
        work(world)
        return None
    return MeasuredHosts(calibration_s, links, measure_messages(world))


def _pairs(size: int) -> list[tuple[int, int]]:
    ranks = range(size)
    pairs = list(combinations(ranks, 2)) if size <= _MOST_HOSTS_IN_PAIRS else [*pairwise(ranks), (0, size - 1)]
    return [pair for a, b in pairs for pair in ((a, b), (b, a))]


def _measure_link(transport: Transport, source: int, target: int) -> tuple[float, float] | None:
    """Return bandwidth in bytes per second and latency in seconds, on the sending side."""
    if transport.rank == target:
        for _ in range(_PINGS):
            receive_bytes(transport, source, limit=WORD_BYTES)
            send_bytes(transport, b"", source)
        for num_bytes in (_LINK_BYTES // 8, _LINK_BYTES):
            receive_tensor(transport, torch.empty(num_bytes, dtype=torch.uint8), source)
            send_bytes(transport, b"", source)
        return None
    trips = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        send_bytes(transport, b"", target)
        receive_bytes(transport, target, limit=WORD_BYTES)
        trips.append(time.perf_counter() - begin)
    taken = []
    for num_bytes in (_LINK_BYTES // 8, _LINK_BYTES):
        begin = time.perf_counter()
        send_tensor(transport, torch.zeros(num_bytes, dtype=torch.uint8), target)
        receive_bytes(transport, target, limit=WORD_BYTES)
        taken.append(time.perf_counter() - begin)
    # the difference excludes the fixed cost of a message and the link's burst
    return (_LINK_BYTES - _LINK_BYTES // 8) / max(1e-9, taken[1] - taken[0]), statistics.median(trips) / 2
