"""Stages in place, as the driver uses them: microbatches in, results out."""

import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.deploy.jobs import FromModules, Source, send_stages
from penstock.deploy.policies import check_operators
from penstock.deploy.run_options import RunOptions
from penstock.engine.counters import ACTIVATIONS, Counters
from penstock.engine.driver import JOIN_S, DeployedPipeline, Microbatch
from penstock.engine.executor import OwnStages
from penstock.engine.job import StagesJob
from penstock.engine.observer import StreamReport
from penstock.engine.stall import StallWatch
from penstock.engine.tracers import FeederTracer
from penstock.engine.wiring import feeder_links, go_direct, stream_links
from penstock.errors import ConnectionBroken, TransportError
from penstock.graph.program import StageProgram
from penstock.group.world import World, assign_stages
from penstock.runtime.registry import RuntimeChoice
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
    """Pipelines in place on the devices of a world, ready for successive streams.

    Several pipelines share the microbatches of a stream in `order`, which repeats; by default one after the other.

    Example:
        Deployment(world, [first, second], order=(0, 0, 1)).stream(microbatches)     # the first is twice as fast

    Raises `RunError` or `DeviceLost` if a device fails; after that nothing more can be streamed. If a message is lost
    but no device fails, this is detected once no message has arrived and no stage has computed for `stall_s` while the
    driver waits.
    """

    def __init__(self, world: World, pipelines: Sequence[DeployedPipeline], order: Sequence[int] | None = None) -> None:
        self.world = world
        self.pipelines = tuple(pipelines)
        self.order = tuple(order) if order is not None else tuple(range(len(pipelines)))

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the largest microbatch."""
        return self.pipelines[0].job.sizes

    @property
    def last_report(self) -> StreamReport:
        """Times of the last stream."""
        return self.pipelines[0].report

    @property
    def traces(self) -> Sequence[StreamTrace]:
        """Traces of the last stream by process, the driver first; empty if none was recorded."""
        return self.pipelines[0].traces

    def stream(self, microbatches: Iterable[Microbatch]) -> Generator[list[Tensor], None, None]:
        """Stream microbatches and yield their results in order; closing the generator early cancels and drains.

        An exception of `microbatches` itself is raised here after the microbatches in flight have drained; the stages
        are then ready for the next stream. Raises `UsageError` while another stream is running. A `KeyboardInterrupt`
        during a transfer abandons the pipelines, because the state of the transfer is unknown.
        """
        first, report = self.pipelines[0], StreamReport()
        for pipeline in self.pipelines:
            pipeline.begin()
            pipeline.report = report
        try:
            source = iter(microbatches)
            yield from self._drive(first.tracer.loading(source) if first.tracer else source, report)
        except (TransportError, KeyboardInterrupt) as error:
            # the stages may be out of sync: an interrupt can occur in the middle of a send
            self.world.health.report(error)
            raise
        finally:
            report.stages = [stage for pipeline in self.pipelines for stage in pipeline.finish()]
            if first.tracer is not None and report.stages:
                traces = [first.tracer.own(), *(trace for pipeline in self.pipelines for trace in pipeline.traces)]
                for pipeline in self.pipelines:
                    pipeline.traces = traces

    def _drive(self, source: Iterator[Microbatch], report: StreamReport) -> Generator[list[Tensor], None, None]:
        """Feed microbatches round-robin and take results alternately, and update the report."""
        begin, symbols = time.perf_counter(), self.pipelines[0].symbols
        exhausted = False
        fed = taken = 0
        while not exhausted or taken < fed:
            while not exhausted and self.pipeline_of(fed).has_room:
                following = next(source, None)
                if following is None:
                    exhausted = True
                    for pipeline in self.pipelines:
                        pipeline.end()
                    break
                tensors, sizes = following
                self.pipeline_of(fed).feed(tensors, [sizes[symbol] for symbol in symbols])
                fed += 1
                report.num_rows += sizes.get("batch", 1)
                report.fed_s = time.perf_counter() - begin
                if self.pipeline_of(taken).has_result:
                    break  # yield the result before feeding the next microbatch: results never wait for a full pipeline
            if taken < fed:
                result = self.pipeline_of(taken).take()
                taken += 1
                report.took(time.perf_counter() - begin)
                yield result

    def pipeline_of(self, microbatch: int) -> DeployedPipeline:
        """Return the pipeline of a microbatch, which depends only on its number in the stream."""
        return self.pipelines[self.order[microbatch % len(self.order)]]

    def stage_states(self) -> list[StageState]:
        """Return the progress of each stage at the last heartbeat, two per second; for `LiveView`."""
        return [state for each in self.pipelines for state in each.watch.states(each.job.options.depth)]

    def abandon(self) -> None:
        """Stop immediately, even with microbatches in flight; nothing more can be streamed."""
        for pipeline in self.pipelines:
            pipeline.abandon()
            _join(pipeline)

    def close(self) -> None:
        """Close the stages; the world stays. A running stream is cancelled."""
        for pipeline in self.pipelines:
            try:
                pipeline.finish()
                if self.world.health.failure is None:
                    pipeline.stop()
            finally:
                if self.world.health.failure is not None:
                    pipeline.give_up()
                _join(pipeline)

    def leave(self) -> None:
        """Close at interpreter exit without starting a thread, which Python 3.12 and later refuse at that point."""
        for pipeline in self.pipelines:
            self.world.health.when_failed(pipeline.give_up)
            pipeline.finish()
            if self.world.health.failure is None:
                channels = pipeline.channels
                channels.senders[FEEDER_STAGE, ACTIVATIONS].put(Message(CLOSE))
                while channels.receivers[FEEDER_STAGE, ACTIVATIONS].take().kind != CLOSE:
                    pass
            _join(pipeline)


def deploy_pipeline(
    world: World, programs: Sequence[Sequence[StageProgram]], source: Source, run: RunOptions, *,
    sizes: Mapping[str, int], ranks: Sequence[int] | None = None, number: int = 0,
    runtimes: Sequence[RuntimeChoice] = (), order: Sequence[int] = (0,), tracer: FeederTracer | None = None,
    index: int = 0,
) -> DeployedPipeline:  # fmt: skip
    """Send each device its stages of a pipeline, and connect the driver to them.

    `programs` has the programs of each stage, by number: one, or one for each set of cuts. Microbatches use the numbers
    in `order`, which repeats. `ranks` has for each stage the rank that holds it.
    `index` is the pipeline's among those of a `Deployment`.
    """
    holders = tuple(ranks or assign_stages(world, len(programs)))
    job = StagesJob(
        number=number, ranks=holders, sizes=dict(sizes), device_names=tuple(world.names),
        options=run.of_stages(), runtimes=tuple(runtimes) or (run.runtime,) * len(programs),
        trace=tracer.tracing if tracer is not None else None, torch_settings=dict(read_settings()),
    )  # fmt: skip
    check_operators(world, holders, programs)
    try:
        send_stages(world.transport, job, programs, source, compare=world.membership is not None)
        device = find_device(run.device, world.position) if FEEDER in job.holders else HOST
        direct = run.device != HOST.type and not isinstance(source, FromModules)
        direct = direct and go_direct(world, job.holders, device)
        stages = job.stages_of(FEEDER)
        here = {
            stage: source.make(stage, programs[stage], runtime, runtime.place(device, world.position))
            for stage, runtime in zip(stages, map(job.runtime_of, stages), strict=True)
        }
        own = OwnStages(world, job, here, direct, feeder_links(programs))
        if tracer is not None:
            tracer.follow(own, index)
    except TransportError as error:
        world.raise_cause(error)
    counters, depth = Counters(), job.options.depth
    pipeline = DeployedPipeline(
        world, job, programs[0][0].symbols, tuple(order),
        stage_bytes=[
            sum(program.state_bytes(packed=job.runtime_of(stage).is_stored) for program in each)
            for stage, each in enumerate(programs)
        ],
        cache_bytes=[
            sum(state.value.num_bytes({}) for program in each for state in program.caches) for each in programs
        ],
        channels=own.channels, watch=_watch(world, job, programs, run.stall_s, counters), counters=counters,
        window=(depth + 1) * len(job.ranks) + depth, tracer=tracer,
    )  # fmt: skip
    if stages:
        ready = threading.Event()
        arguments = own, pipeline.errors, ready
        pipeline.executor = threading.Thread(target=_serve, args=arguments, name="penstock-stages", daemon=True)
        pipeline.executor.start()
        ready.wait()
        torch.set_num_threads(torch.get_num_threads())  # of threads that the caller starts from now on
    return pipeline


def _watch(
    world: World, job: StagesJob, programs: Sequence[Sequence[StageProgram]], stall_s: float, counters: Counters
) -> StallWatch:
    """Watch for a stream that no longer moves; `counters` are the driver's."""
    holders = {index: {rank: world.names[rank]} for index, rank in enumerate(job.ranks)}
    return StallWatch(
        job.number, sorted(stream_links(dict(enumerate(programs)), len(programs)), key=lambda link: link.number),
        [holders | {FEEDER_STAGE: {FEEDER: world.names[FEEDER]}}], world.health.statuses,
        max(stall_s, _SHORTEST_STALL_BEATS * world.health.beat_s), own=counters,
    )  # fmt: skip


def _serve(own: OwnStages, errors: "queue.Queue[BaseException]", ready: threading.Event) -> None:
    """Run this process's own stages, in a thread; `ready` is set once the thread has its number of torch threads."""
    torch.set_num_threads(own.job.threads)
    ready.set()
    try:
        own.serve()
    except ConnectionBroken:
        pass  # the driver's thread sees the same broken connection and explains it
    except Exception as error:
        own.world.health.report(error)
        errors.put(error)


def _join(pipeline: DeployedPipeline) -> None:
    if pipeline.executor is not None:
        pipeline.executor.join(JOIN_S)
        pipeline.executor = None
