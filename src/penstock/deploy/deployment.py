"""A deployed pipeline, as the driver uses it: microbatches in, results out."""

import queue
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence

from torch import Tensor

from penstock.deploy.jobs import FromModules, Source, send_stages
from penstock.deploy.programs import check_operators
from penstock.deploy.run_options import RunOptions
from penstock.engine.counters import ACTIVATIONS, Counters
from penstock.engine.driver import JOIN_S, Driver, Microbatch, finish_stream, stream_through
from penstock.engine.executor import OwnStages
from penstock.engine.job import Rotation, StagesJob
from penstock.engine.observer import StreamReport
from penstock.engine.place import Place
from penstock.engine.stall import StallWatch
from penstock.engine.tracers import FeederTracer
from penstock.engine.wiring import feeder_links, stream_links
from penstock.errors import ConnectionBroken, TransportError, UsageError
from penstock.graph.program import StageProgram
from penstock.group.direct import go_direct
from penstock.group.world import World, assign_stages
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.registry import RuntimeChoice, StageRuntime
from penstock.runtime.torch_settings import read_settings
from penstock.tensors import HOST, find_device
from penstock.terminal.live import StageState
from penstock.tracing.record import FEEDER_STAGE
from penstock.tracing.trace import StreamTrace
from penstock.transport.messages import CLOSE, Message
from penstock.wire import FEEDER

# stages report progress with every heartbeat: a stall shorter than a few heartbeats cannot be detected
_SHORTEST_STALL_BEATS = 4


class Deployment:
    """Stages placed on the devices of a world, ready for successive streams.

    `programs` has the programs of each stage, by number: one, or one for each set of cuts. Microbatches use the numbers
    in `order`, which repeats. `ranks` has for each stage the rank that holds the stage, or several ranks that share it.

    Raises `RunError` or `DeviceLost` if a device fails; after that nothing more can be streamed. If a message is lost
    but no device fails, this is detected once no message has arrived and no stage has computed for `stall_s` while the
    driver waits.
    """

    def __init__(
        self, world: World, programs: Sequence[Sequence[StageProgram]], source: Source, run: RunOptions, *,
        sizes: Mapping[str, int], ranks: Sequence[int | RoundRobin[int]] | None = None, number: int = 0,
        runtimes: Sequence[RuntimeChoice] = (), order: Sequence[int] = (0,), tracer: FeederTracer | None = None,
        pipeline: int = 0,
    ) -> None:  # fmt: skip
        self.world = world
        self.symbols = programs[0][0].symbols
        self.cache_bytes = [
            sum(state.value.num_bytes({}) for program in each for state in program.caches) for each in programs
        ]
        self.stage_bytes = [sum(program.state_bytes() for program in each) for each in programs]
        places = [
            Rotation(each.items, each.order) if isinstance(each, RoundRobin) else Rotation((each,))
            for each in ranks or assign_stages(world, len(programs))
        ]
        runtimes = tuple(runtimes) or (run.runtime,) * len(programs)
        self.job = StagesJob(
            number=number, ranks=tuple(places), sizes=dict(sizes), device_names=tuple(world.names),
            options=run.of_stages(), runtimes=runtimes, trace=tracer.tracing if tracer is not None else None,
            torch_settings=dict(read_settings()),
        )  # fmt: skip
        _check_shared(self.job)
        check_operators(world, [ranks.items for ranks in places], programs)
        self.tracer, self._pipeline = tracer, pipeline  # index among parallel pipelines
        self._executor: threading.Thread | None = None
        try:
            send_stages(world.transport, self.job, programs, source, compare=world.membership is not None)
            own = find_device(run.device, world.position) if FEEDER in self.job.holders else HOST
            direct = run.device != HOST.type and not isinstance(source, FromModules)
            direct = direct and go_direct(world, self.job.holders, own)
            runtimes_here = {
                index: source.make(index, programs[index], self.job.runtime_of(index), own)
                for index in self.job.stages_of(FEEDER)
            }
            self.place = self._connect(programs, runtimes_here, tuple(order), run.stall_s, direct=direct)
        except TransportError as error:
            raise world.explain(error) from error

    def _connect(
        self, programs: Sequence[Sequence[StageProgram]], runtimes: Mapping[int, Sequence[StageRuntime]],
        order: tuple[int, ...], stall_s: float, *, direct: bool,
    ) -> Place:  # fmt: skip
        """Open the channels of the driver and of its own stages, and start serving these stages."""
        world, job = self.world, self.job
        own = OwnStages(world, job, runtimes, direct, feeder_links(programs))
        counters = Counters()
        holders = {index: {rank: world.names[rank] for rank in ranks.items} for index, ranks in enumerate(job.ranks)}
        watch = StallWatch(
            job.number, sorted(stream_links(dict(enumerate(programs)), len(programs)), key=lambda link: link.number),
            [holders | {FEEDER_STAGE: {FEEDER: world.names[FEEDER]}}], world.health.statuses,
            max(stall_s, _SHORTEST_STALL_BEATS * world.health.beat_s), own=counters,
        )  # fmt: skip
        depth = job.options.depth
        window = (depth + 1) * sum(len(ranks.items) for ranks in job.ranks) + depth
        if self.tracer is not None:
            self.tracer.follow(own, self._pipeline)
        errors: queue.Queue[BaseException] = queue.Queue()
        if runtimes:
            self._executor = threading.Thread(
                target=self._serve, args=(own, errors), name="penstock-stages", daemon=True
            )
            self._executor.start()
        return Place(world, job, self.symbols, order, own.channels, watch, counters, window, self.tracer, errors)

    def _serve(self, own: OwnStages, errors: "queue.Queue[BaseException]") -> None:
        """Run this process's own stages, in a thread."""
        try:
            own.serve()
        except ConnectionBroken:
            pass  # the driver's thread sees the same broken connection and explains it
        except Exception as error:
            self.world.health.report(error)
            errors.put(error)

    def stream(self, microbatches: Iterable[Microbatch]) -> Generator[list[Tensor], None, None]:
        """Stream microbatches and yield their results in order; closing the generator early cancels and drains.

        An exception of `microbatches` itself is raised here after the microbatches in flight have drained; the stages
        are then ready for the next stream. Raises `UsageError` while another stream is running. A `KeyboardInterrupt`
        during a transfer abandons the pipeline, because the state of the transfer is unknown.
        """
        return stream_through(RoundRobin([self.place]), microbatches)

    @property
    def order(self) -> tuple[int, ...]:
        """The order of pipelines, for the interface shared with `Replicas`."""
        return (0,)

    @property
    def deployments(self) -> "tuple[Deployment, ...]":
        """This deployment as a tuple of one, for the interface shared with `Replicas`."""
        return (self,)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the largest microbatch."""
        return self.job.sizes

    def stage_states(self) -> list[StageState]:
        """Return the progress of each stage at the last heartbeat, two per second; for `LiveView`."""
        return self.place.watch.states(self.job.options.depth)

    @property
    def last_report(self) -> StreamReport:
        """Times of the last stream."""
        return self.place.report

    @property
    def traces(self) -> Sequence[StreamTrace]:
        """Traces of the last stream by process, the driver first; empty if none was recorded."""
        return self.place.traces

    def abandon(self) -> None:
        """Stop immediately, even with microbatches in flight; nothing more can be streamed."""
        self.place.give_up()
        if self.place.driver is not None:
            self.place.driver.abandon()
        self._join()

    def close(self) -> None:
        """Close the stages; the world stays. A running stream is cancelled."""
        try:
            finish_stream(self.place)
            if self.world.health.failure is None:
                Driver(self.place).stop()
        finally:
            if self.world.health.failure is not None:
                self.place.give_up()
            self._join()

    def leave(self) -> None:
        """Close at interpreter exit without starting a thread, which Python 3.12 and later refuse at that point."""
        self.world.health.call_instead(self.place.give_up)
        finish_stream(self.place)
        if self.world.health.failure is None:
            channels = self.place.channels
            channels.senders[FEEDER_STAGE, ACTIVATIONS].put(Message(CLOSE))
            while channels.receivers[FEEDER_STAGE, ACTIVATIONS].take().kind != CLOSE:
                pass
        self._join()

    def _join(self) -> None:
        if self._executor is not None:
            self._executor.join(JOIN_S)
            self._executor = None


class Replicas:
    """Parallel pipelines on disjoint devices that share the microbatches of one stream round-robin.

    Example:
        Replicas([first, second], order=(0, 0, 1)).stream(microbatches)     # the first is twice as fast
    """

    def __init__(self, deployments: Sequence[Deployment], order: Sequence[int] | None = None) -> None:
        self.deployments = tuple(deployments)
        self.order = tuple(order) if order is not None else tuple(range(len(deployments)))

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the largest microbatch."""
        return self.deployments[0].sizes

    @property
    def traces(self) -> Sequence[StreamTrace]:
        """Traces of the last stream by process, the driver first; empty if none was recorded."""
        return self.deployments[0].traces

    @property
    def last_report(self) -> StreamReport:
        """Times of the last stream."""
        return self.deployments[0].last_report

    @property
    def world(self) -> World:
        """The world that all pipelines run in."""
        return self.deployments[0].world

    def stream(self, microbatches: Iterable[Microbatch]) -> Generator[list[Tensor], None, None]:
        """Stream microbatches and yield their results in order, as `Deployment.stream` does."""
        places = [deployment.place for deployment in self.deployments]
        return stream_through(RoundRobin(places, self.order), microbatches)

    def stage_states(self) -> list[StageState]:
        """Return the progress of each stage of each pipeline, as `Deployment.stage_states`."""
        return [state for deployment in self.deployments for state in deployment.stage_states()]

    def abandon(self) -> None:
        """Stop immediately, even with microbatches in flight; nothing more can be streamed."""
        for deployment in self.deployments:
            deployment.abandon()

    def close(self) -> None:
        """Close all stages; the world stays."""
        for deployment in self.deployments:
            deployment.close()

    def leave(self) -> None:
        """Close at interpreter exit, as `Deployment.leave`."""
        for deployment in self.deployments:
            deployment.leave()


def _check_shared(job: StagesJob) -> None:
    """Raise `UsageError` if a rank that shares a stage holds another stage: they could deadlock at a stream's end."""
    for rank in sorted({rank for ranks in job.ranks if len(ranks.items) > 1 for rank in ranks.items}):
        stages = job.stages_of(rank)
        if len(stages) > 1:
            raise UsageError(
                f"a device that shares a stage must hold no other stage; rank {rank} would hold the stages "
                f"{', '.join(map(str, stages))}; give each stage to a separate device"
            )
