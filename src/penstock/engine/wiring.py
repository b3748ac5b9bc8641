"""The edges of a job's stages: between ranks, within one, and to and from all that share a stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from penstock.engine.channels import Apart, Inlet, LocalEdge, Outlet, RemoteInlet, RemoteOutlet
from penstock.engine.counters import write_progress
from penstock.engine.executor import StageReport, StageSlot
from penstock.engine.placement import StagesJob
from penstock.engine.sharing import SharedInlet, SharedOutlet, sources_of
from penstock.graph.program import StageProgram
from penstock.group.world import World
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.eager import StageRuntime
from penstock.tensors.devices import HOST
from penstock.transport.base import FEEDER, Transport
from penstock.transport.messages import Format, Formats

# channel 0 carries jobs; each job's edges get channels of their own
_CHANNELS_PER_JOB = 1024
_Remote = TypeVar("_Remote", RemoteInlet, RemoteOutlet)


def build_slots(
    transport: Transport, job: StagesJob, runtimes: Mapping[int, RoundRobin[StageRuntime]]
) -> tuple[dict[int, StageSlot], dict[int, LocalEdge]]:
    """Put a rank's stages between their edges; gives the stages and the edges within this process."""
    devices = [turns.items[0].device for turns in runtimes.values()]
    wiring = _Wiring(
        transport, job, pinned=any(device.type == "cuda" for device in devices), device=devices[0] if devices else HOST
    )
    slots: dict[int, StageSlot] = {}
    for index, turns in sorted(runtimes.items()):
        programs = turns.map(lambda runtime: runtime.program)
        inlet, outlet = (
            wiring.inlet(index, _input_formats(programs, job)),
            wiring.outlet(index + 1, _output_formats(programs, job)),
        )
        report = StageReport(stage=index, device=job.device_names[transport.rank])
        slots[index] = StageSlot(index, turns, inlet, outlet, report, others=len(job.ranks) - 1)
    return slots, wiring.local


def feeder_edges(
    transport: Transport,
    job: StagesJob,
    first: RoundRobin[StageProgram],
    last: RoundRobin[StageProgram],
    local: Mapping[int, LocalEdge],
) -> tuple[Outlet, Inlet]:
    """Return the feeder's ends of the pipeline: where microbatches go in, where results come out."""
    wiring = _Wiring(transport, job, dict(local))
    return wiring.outlet(0, _input_formats(first, job)), wiring.inlet(len(job.ranks), _output_formats(last, job))


def tell_progress(world: World, job: StagesJob, slots: Mapping[int, StageSlot]) -> None:
    """Let this process say with every heartbeat how far its stages are."""
    stages = {index: slot.progress for index, slot in slots.items()}
    world.health.status = lambda: write_progress(job.number, world.rank, stages)


@dataclass
class _Wiring:
    """One rank's edges of a job.

    Edge `e` goes into stage `e`, from the ranks `ends[e]` to `ends[e + 1]`; the feeder holds the outer ends.

        feeder ──0──▶ stage 0 ──1──▶ stage 1 ──2──▶ feeder
    """

    transport: Transport
    job: StagesJob
    local: dict[int, LocalEdge] = field(default_factory=dict)
    pinned: bool = False
    device: torch.device = HOST

    def __post_init__(self) -> None:
        self._ends = [RoundRobin([FEEDER]), *self.job.ranks, RoundRobin([FEEDER])]

    def inlet(self, edge: int, layout: Formats) -> Inlet:
        before, here = self._ends[edge], self._ends[edge + 1]
        inlets = before.map(lambda rank: self._end(RemoteInlet, rank, edge, layout)).items
        if len(inlets) == 1:
            return inlets[0]
        return SharedInlet(inlets, sources_of(before, here, self.transport.rank))

    def outlet(self, edge: int, layout: Formats) -> Outlet:
        outlets = self._ends[edge + 1].map(lambda rank: self._end(RemoteOutlet, rank, edge, layout))
        return outlets.items[0] if len(outlets.items) == 1 else SharedOutlet(outlets)

    def _end(self, remote: Callable[..., _Remote], rank: int, edge: int, layout: Formats) -> _Remote | LocalEdge:
        """Return this rank's end of an edge whose other end a rank has, perhaps this one."""
        job = self.job
        if rank == self.transport.rank:
            return self.local.setdefault(edge, LocalEdge(job.depth))
        channel = 1 + (job.number * _CHANNELS_PER_JOB + edge) % 2**30
        if job.direct and 0 < edge < len(job.ranks):  # the outer ones end at the feeder, on its host
            num_bytes, num_apart = layout.largest_apart(job.sizes)
            apart = Apart(self.device, num_apart)
            return remote(self.transport, rank, channel, layout, num_bytes, job.depth, apart=apart)
        num_bytes = layout.largest(job.sizes)
        return remote(self.transport, rank, channel, layout, num_bytes, job.depth, pinned=self.pinned)


def _input_formats(programs: RoundRobin[StageProgram], job: StagesJob) -> Formats:
    return Formats(programs.map(lambda program: Format(program.inputs, program.symbols, job.sizes)))


def _output_formats(programs: RoundRobin[StageProgram], job: StagesJob) -> Formats:
    return Formats(programs.map(lambda program: Format(program.outputs, program.symbols, job.sizes)))
