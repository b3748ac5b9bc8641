"""A pipeline in place, seen from the process that feeds it: put microbatches in, take results out."""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.deploy.bundle import LoadState
from penstock.deploy.jobs import Parts, load_programs, send_stages
from penstock.deploy.streaming import Lane, Microbatch, StreamReport, stream_through
from penstock.engine.channels import LocalEdge
from penstock.engine.counters import STALL_S, Progress, StallWatch, read_progress
from penstock.engine.driver import JOIN_S, Ends
from penstock.engine.executor import StageReport, StageSlot, serve
from penstock.engine.placement import StagesJob
from penstock.engine.tracers import FeederTracer
from penstock.engine.wiring import build_slots, feeder_edges, tell_progress
from penstock.errors import ConnectionBroken, TransportError, UsageError
from penstock.graph.program import StageProgram
from penstock.group.direct import go_direct
from penstock.group.world import World, check_world
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.eager import StageRuntime
from penstock.tensors.devices import HOST, find_device
from penstock.tracing.trace import StreamTrace
from penstock.transport.base import FEEDER
from penstock.transport.messages import CLOSE, Message

# makes a stage's runtimes where they do not come from programs and weights
MakeRuntimes = Callable[[int], RoundRobin[StageRuntime]]
# Two buffers per cut: one message is being worked on while the next one arrives.
DEPTH = 2
# stages say how far they are with every heartbeat: what is shorter than a few of these means nothing
_SHORTEST_STALL_BEATS = 4


class Deployment:
    """Stages placed on the devices of a world, ready for one stream after the other.

    Each stage is one program, or several that take turns where the cuts around it do; all stages take turns
    in the same order. `ranks` has for each stage the rank that holds it, or several that take turns on it.

    Raises what happened to a device as `RunError` or `DeviceLost`; after that nothing more can be
    streamed. A message that is lost without any device failing shows when nothing has moved and no
    stage has computed for `stall_s`, while the feeder waits.
    """

    def __init__(
        self, world: World, programs: Sequence[RoundRobin[StageProgram]], load: LoadState | None, *,
        sizes: Mapping[str, int], threads: int, make: MakeRuntimes | None = None,
        ranks: Sequence[int | RoundRobin[int]] | None = None,
        parts: Parts | None = None, number: int = 0, depth: int = DEPTH, stall_s: float = STALL_S,
        computes_on: str = "cpu", tracer: FeederTracer | None = None,
    ) -> None:  # fmt: skip
        self.world = world
        self.symbols = programs[0].items[0].symbols
        places = [
            r if isinstance(r, RoundRobin) else RoundRobin([r]) for r in ranks or check_world(world, len(programs))
        ]
        self.job = StagesJob(
            number=number, ranks=tuple(places), sizes=dict(sizes), depth=depth, threads=threads,
            device_names=tuple(world.names), computes_on=computes_on, trace=tracer is not None,
            trace_units=tracer is not None and tracer.units, trace_profile=tracer is not None and tracer.profile,
        )  # fmt: skip
        _check_shared(self.job)
        self.tracer = tracer
        self.traces: Sequence[StreamTrace] = []  # of the last stream's processes, where it was recorded
        self._window = (depth + 1) * sum(len(ranks.items) for ranks in places) + depth
        self._executor: threading.Thread | None = None
        self._errors: queue.Queue[BaseException] = queue.Queue()
        self._stream: Ends | None = None
        shortest_s = _SHORTEST_STALL_BEATS * world.health.beat_s
        self._watch = StallWatch(
            number,
            [{rank: world.names[rank] for rank in ranks.items} for ranks in places],
            world.health.statuses,
            max(stall_s, shortest_s),
        )
        try:
            send_stages(world.transport, self.job, programs, load, parts)
            if computes_on != HOST.type and (parts is not None or load is not None):
                own = find_device(computes_on, world.position) if FEEDER in self.job.holders else HOST
                self.job = replace(self.job, direct=go_direct(world, self.job.holders, own))
            slots, self._local = self._build_own_stages(programs, load, make)
            self._outlet, self._inlet = feeder_edges(world.transport, self.job, programs[0], programs[-1], self._local)
            if tracer is not None:
                tracer.follow(self._outlet, self._inlet, self.job.holders, slots)
            self._serve(slots)
        except TransportError as error:
            raise world.explain(error) from error
        self.last_report = StreamReport()

    def _build_own_stages(
        self, programs: Sequence[RoundRobin[StageProgram]], load: LoadState | None, make: MakeRuntimes | None
    ) -> tuple[Mapping[int, StageSlot], Mapping[int, LocalEdge]]:
        """Under torchrun the feeding process holds stages too."""
        own = self.job.stages_of(FEEDER)
        if not own:
            return {}, {}
        device = find_device(self.job.computes_on, self.world.position)
        runtimes = {index: _make_runtimes(index, programs[index], load, make, device) for index in own}
        slots, local = build_slots(self.world.transport, self.job, runtimes)
        tell_progress(self.world, self.job, slots)
        return slots, local

    def _serve(self, slots: Mapping[int, StageSlot]) -> None:
        """Run this process's own stages, if it has any, in a thread."""
        if not slots:
            return

        def run() -> None:
            torch.set_num_threads(self.job.threads)
            try:
                serve(slots, lambda: self.job.schedule(FEEDER))
            except ConnectionBroken:
                pass  # the feeding thread sees the same broken connection and explains it
            except Exception as error:
                self.world.health.report(error)
                self._errors.put(error)

        self._executor = threading.Thread(target=run, name="penstock-stages", daemon=True)
        self._executor.start()

    def stream(self, microbatches: Iterable[Microbatch]) -> Generator[list[Tensor], None, None]:
        """Feed microbatches and give their results in order; leaving early cancels and drains.

        An exception of `microbatches` itself comes out here once what is under way has been drained;
        the next stream finds the stages ready. Raises `UsageError` while another stream is under way.
        A `KeyboardInterrupt` in the middle gives the pipeline up: what was being handed over is not known.
        """
        return Replicas([self]).stream(microbatches)

    def progress(self) -> dict[tuple[int, int], Progress]:
        """Return what the stages have counted, by stage and rank, as the last heartbeats said it."""
        return read_progress(self.job.number, self.world.health.statuses())

    @property
    def num_fed(self) -> int:
        """How many messages this pipeline has been fed."""
        return self._watch.fed

    @property
    def deployments(self) -> "tuple[Deployment, ...]":
        """Itself, as `Replicas` have several."""
        return (self,)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the largest microbatch."""
        return self.job.sizes

    def open(self) -> Lane:
        """Begin a stream; raises `UsageError` while another one is under way."""
        if self._stream is not None:
            raise UsageError("another stream is under way; take all of its results or close() it first")
        self._stream = self._open()
        return Lane(self._stream, self._window)

    def finish(self) -> list[StageReport]:
        """End the stream under way: what is on its way is thrown away. Gives the stages' reports."""
        ends, self._stream = self._stream, None
        reports = ends.finish() if ends is not None else []
        if reports and self.tracer is not None:
            try:
                self.traces = self.tracer.gather(self.job.holders)
            except TransportError as error:
                raise self.world.explain(error) from error
        return reports

    def _open(self) -> Ends:
        return Ends(self.world, self.job, self._outlet, self._inlet, self._errors, self._watch, self._give_up)

    def _give_up(self) -> None:
        """After a failure: end every wait of this process, so that its threads end by themselves."""
        self.world.transport.abort()
        for edge in self._local.values():
            edge.abort()

    def abandon(self) -> None:
        """End at once, whatever is under way; nothing more can be streamed."""
        self._give_up()
        if self._stream is not None:
            self._stream.abandon()
        self._join()

    def close(self) -> None:
        """Tell the stages to stop serving; the world stays. A stream under way is cancelled."""
        try:
            self.finish()
            if self.world.health.failure is None:
                ends = self._open()
                ends.stop()
        finally:
            if self.world.health.failure is not None:
                self._give_up()
            self._join()

    def leave(self) -> None:
        """Do what `close` does when the program ends: from Python 3.12 on, no thread can be started then."""
        self.world.health.call_instead(self._give_up)
        self.finish()
        if self.world.health.failure is None:
            self._outlet.put(Message(CLOSE))
            while self._inlet.take().kind != CLOSE:
                pass
        self._join()

    def _join(self) -> None:
        if self._executor is not None:
            self._executor.join(JOIN_S)
            self._executor = None


class Replicas:
    """Pipelines side by side, each with devices of its own, that take turns on the microbatches of one stream.

    Example:
        Replicas([first, second], order=(0, 0, 1)).stream(microbatches)     # the first one is twice as fast
    """

    def __init__(self, deployments: Sequence[Deployment], order: Sequence[int] | None = None) -> None:
        self.deployments = tuple(deployments)
        self._order = tuple(order) if order is not None else tuple(range(len(deployments)))
        self.tracer = self.deployments[0].tracer
        self.last_report = StreamReport()

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the largest microbatch."""
        return self.deployments[0].sizes

    @property
    def traces(self) -> Sequence[StreamTrace]:
        """What the processes recorded of the last stream, the feeding one first; empty where nothing was."""
        return self.deployments[0].traces

    @property
    def world(self) -> World:
        """The world that all of them run in."""
        return self.deployments[0].world

    def stream(self, microbatches: Iterable[Microbatch]) -> Generator[list[Tensor], None, None]:
        """Feed microbatches and give their results in order, as `Deployment.stream` does."""
        lanes = RoundRobin([deployment.open() for deployment in self.deployments], self._order)
        report = self.last_report = StreamReport()
        for deployment in self.deployments:
            deployment.last_report = report
        try:
            recorder = self.tracer.recorder if self.tracer else None
            yield from stream_through(lanes, self.deployments[0].symbols, microbatches, report, recorder)
        except (TransportError, KeyboardInterrupt) as error:
            # the stages are out of step, or may be: an interrupt can fall between any two steps of a hand-over
            self.world.health.report(error)
            raise
        finally:
            report.stages = [stage for deployment in self.deployments for stage in deployment.finish()]
            if self.tracer is not None and report.stages:
                traces = [self.tracer.own(), *(t for deployment in self.deployments for t in deployment.traces)]
                for deployment in self.deployments:
                    deployment.traces = traces

    def abandon(self) -> None:
        """End at once, whatever is under way; nothing more can be streamed."""
        for deployment in self.deployments:
            deployment.abandon()

    def close(self) -> None:
        """Tell all stages to stop serving; the world stays."""
        for deployment in self.deployments:
            deployment.close()

    def leave(self) -> None:
        """Do what `close` does when the program ends, as `Deployment.leave`."""
        for deployment in self.deployments:
            deployment.leave()


def _check_shared(job: StagesJob) -> None:
    """With more to do, its other stages would wait for the end of a stream while it still waits for a turn."""
    for rank in sorted({rank for ranks in job.ranks if len(ranks.items) > 1 for rank in ranks.items}):
        stages = job.stages_of(rank)
        if len(stages) > 1:
            raise UsageError(
                f"a device that shares a stage holds no other, but rank {rank} would hold the stages "
                f"{', '.join(map(str, stages))}; give each of them to a device of its own"
            )


def _make_runtimes(
    index: int,
    programs: RoundRobin[StageProgram],
    load: LoadState | None,
    make: MakeRuntimes | None,
    device: torch.device,
) -> RoundRobin[StageRuntime]:
    if make is not None:
        return make(index)
    if load is None:
        raise UsageError("a deployment needs weights to load, or modules to run; give load or make")
    return RoundRobin(load_programs(programs.items, load, device), programs.order)
