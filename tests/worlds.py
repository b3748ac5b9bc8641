"""Worlds for tests: threads that play worker processes, and models that are quick and can be made to fail."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock.deploy.deployment import Deployment, deploy_pipeline
from penstock.deploy.jobs import FromWeights
from penstock.deploy.policies import choose_cuts, divide_by_sets
from penstock.deploy.run_options import RunOptions
from penstock.deploy.state import load_state
from penstock.deploy.worker import work
from penstock.errors import PenstockError
from penstock.graph.capture import capture
from penstock.graph.cuts import Cuts
from penstock.graph.graph import Graph
from penstock.graph.program import StageProgram
from penstock.group.liveness import Boards, Health
from penstock.group.world import World
from penstock.transport.base import MeteredTransport
from penstock.transport.faulty import Fault, FaultyTransport
from penstock.transport.memory_network import MemoryNetwork
from penstock.zoo.weights.weights import ModuleWeights

WIDTH, ROWS = 8, 4


class Tower(nn.Module):
    """Blocks that add a linear layer and a looked-up row; an index beyond the table fails in its block."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(num_blocks))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        for index, (layer, table) in enumerate(zip(self.layers, self.tables, strict=True)):
            x = x + torch.relu(layer(x)) + table(rows[:, index])
        return x


def tower(num_blocks: int = 6) -> Tower:
    """A tower with the same weights every time."""
    torch.manual_seed(0)
    return Tower(num_blocks).eval()


def tower_inputs(num: int, batch: int = 2, num_blocks: int = 6) -> list[tuple[Tensor, Tensor]]:
    """So many different microbatches."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(batch, WIDTH, generator=generator),
            torch.randint(0, ROWS, (batch, num_blocks), generator=generator),
        )
        for _ in range(num)
    ]


def poison(microbatch: tuple[Tensor, Tensor], block: int) -> tuple[Tensor, Tensor]:
    """The same microbatch, made to fail in one block."""
    rows = microbatch[1].clone()
    rows[0, block] = ROWS
    return microbatch[0], rows


@dataclass
class Divided:
    """A model captured and divided once, for many deployments."""

    model: nn.Module
    graph: Graph
    programs: list[tuple[StageProgram, ...]]

    def deploy(self, world: World, *, batch: int = 2, **settings: Any) -> Deployment:
        """Put the stages on a world."""
        weights = ModuleWeights(self.model)
        asked = {name: settings.pop(name) for name in ("stall_s", "depth", "device") if name in settings}
        pipeline = deploy_pipeline(
            world, self.programs, FromWeights(lambda state: load_state(self.graph, state, weights)),
            RunOptions(threads=1, **asked), sizes={"batch": batch}, **settings,
        )  # fmt: skip
        return Deployment(world, [pipeline])


def divided_tower(num_stages: int) -> Divided:
    """A tower in so many stages."""
    model = tower()
    graph = capture(model, tower_inputs(1)[0])
    return Divided(model, graph, divide_by_sets(graph, [choose_cuts(graph, Cuts(graph), stages=num_stages)]))


@dataclass
class MemoryWorld:
    """A feeder's world whose workers are threads."""

    feeder: World
    workers: list[World]
    network: MemoryNetwork
    threads: list[threading.Thread]
    errors: list[BaseException]


def made_world(network: MemoryNetwork, rank: int) -> World:
    """One rank's world of a network that nobody else looks after."""
    size = len(network.transports)
    names = [f"host{index}" for index in range(size)]
    transport = network.transports[rank]
    health = Health(Boards.of_threads(HashStore(), 0, 1), 0, names, transport.abort)
    return World(
        transport=MeteredTransport(transport), health=health, names=names, devices=list(range(1, size)),
        store=HashStore(),
        bandwidths=[None] * size,
    )  # fmt: skip


@contextlib.contextmanager
def memory_world(
    num_workers: int, faults: Sequence[Fault] = (), *, silence_s: float = 5.0, reason_s: float = 0.3
) -> Iterator[MemoryWorld]:
    """Workers as threads over a `MemoryNetwork` with faults; all of them must end soon after the block."""
    size = num_workers + 1
    network = MemoryNetwork(size)
    store = HashStore()
    names = ["the driver", *(f"worker {rank}" for rank in range(1, size))]
    worlds = []
    for rank in range(size):
        transport = FaultyTransport(network.transports[rank], faults)
        boards = Boards.of_threads(store, rank, size)
        health = Health(boards, rank, names, transport.abort, silence_s=silence_s, beat_s=0.02)
        worlds.append(
            World(
                transport=MeteredTransport(transport),
                health=health,
                names=names,
                devices=list(range(1, size)),
                store=store,
                bandwidths=[None] * size,
                reason_s=reason_s,
                between_gpus="auto",
            )
        )
    errors: list[BaseException] = []

    def be_worker(world: World) -> None:
        try:
            work(world)
        except PenstockError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=be_worker, args=(world,), name=f"penstock-worker-{world.rank}", daemon=True)
        for world in worlds[1:]
    ]
    for thread in threads:
        thread.start()
    try:
        yield MemoryWorld(worlds[0], worlds[1:], network, threads, errors)
    except BaseException as error:
        worlds[0].health.report(error)  # workers may be serving stages that nobody closes any more
        raise
    finally:
        with contextlib.suppress(PenstockError):
            if worlds[0].health.failure is None:
                worlds[0].dismiss()
        for thread in threads:
            thread.join(5.0)
        for world in worlds:
            world.close()
        assert not any(thread.is_alive() for thread in threads), "a worker has not ended"
