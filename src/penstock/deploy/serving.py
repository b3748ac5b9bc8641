"""The stages that one process holds of a job, between their channels, and serving them until they are closed."""

from collections.abc import Callable, Iterable, Mapping

import torch

from penstock.engine.counters import write_counters
from penstock.engine.executor import ForwardStage, serve
from penstock.engine.observer import StreamObserver
from penstock.engine.placement import StagesJob
from penstock.engine.wiring import Link, Opening, open_channels, stream_links
from penstock.group.world import World
from penstock.plan.schedule.actions import Action
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.eager import StageRuntime
from penstock.tensors import HOST
from penstock.tracing.record import FEEDER_STAGE
from penstock.transport.base import FEEDER


class OwnStages:
    """A process's stages of a job: what they run, their channels, what is counted of them.

    `feeds` are the links of the feeder, in the process that is it. From here on heartbeats say how far they are.
    """

    def __init__(
        self, world: World, job: StagesJob, runtimes: Mapping[int, RoundRobin[StageRuntime]],
        feeds: Iterable[Link] = (),
    ) -> None:  # fmt: skip
        self.world, self.job = world, job
        self.stages = {index: ForwardStage(each) for index, each in sorted(runtimes.items())}
        feeds = list(feeds)
        links = {link.number: link for link in feeds}
        programs = {index: each.map(lambda runtime: runtime.program) for index, each in runtimes.items()}
        links.update({link.number: link for link in stream_links(programs, len(job.ranks))})
        devices = [stage.device for stage in self.stages.values()]
        opening = Opening(
            ranks={FEEDER_STAGE: RoundRobin([FEEDER])} | dict(enumerate(job.ranks)),
            own=[*self.stages, *([FEEDER_STAGE] if feeds else [])], sizes=job.sizes, number=job.number,
            depth=job.depth, device=devices[0] if devices else HOST, direct=job.direct,
        )  # fmt: skip
        self.channels = open_channels(world.transport, list(links.values()), opening)
        name = job.device_names[world.rank]
        self.observer = StreamObserver(self.stages, name, len(job.ranks) - 1)
        if self.stages:
            world.health.status = lambda: write_counters(job.number, world.rank, self.observer.counters)

    def schedule(self) -> Iterable[Action]:
        """Return what this process does of a stream, without end."""
        return self.job.schedule(self.world.rank)


def serve_stages(own: OwnStages, ended: Callable[[], None]) -> None:
    """Run stream after stream until the stages are closed; `ended` is called after each."""
    torch.set_num_threads(own.job.threads)
    serve(own.schedule, own.stages, own.channels, own.observer, ended)
