"""Stages in place, as the driver uses them: of one pipeline, or of a plan with its cut sets and replicas."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from penstock.deploy.bundle import LoadState, interfaces, read_bundle
from penstock.deploy.jobs import FromBundle, FromModules, FromWeights, Source, send_stages
from penstock.deploy.policies import check_operators, divide_plan, order_of
from penstock.deploy.run_options import RunOptions
from penstock.engine.counters import ACTIVATIONS, Counters
from penstock.engine.driver import JOIN_S, DeployedPipeline, Microbatch
from penstock.engine.executor import OwnStages
from penstock.engine.job import StagesJob
from penstock.engine.observer import StreamReport
from penstock.engine.stall import StallWatch
from penstock.engine.tracers import FeederTracer
from penstock.engine.wiring import feeder_links, go_direct, stream_links
from penstock.errors import ConnectionBroken, PlanError, TransportError
from penstock.graph.graph import Graph
from penstock.graph.ops import Ref
from penstock.graph.program import StageProgram
from penstock.group.world import World, assign_stages
from penstock.plan.schedule.round_robin import round_robin
from penstock.runtime.registry import RuntimeChoice
from penstock.runtime.torch_settings import read_settings
from penstock.spec.fields import fingerprint
from penstock.spec.plan import Plan, PlannedPipeline
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
        number=number,
        ranks=holders,
        sizes=dict(sizes),
        device_names=tuple(world.names),
        options=run.of_stages(),
        runtimes=tuple(runtimes) or (run.runtime,) * len(programs),
        trace=tracer.tracing if tracer is not None else None,
        torch_settings=dict(read_settings()),
    )
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
        world,
        job,
        programs[0][0].symbols,
        tuple(order),
        stage_bytes=[
            sum(program.state_bytes(packed=job.runtime_of(stage).is_stored) for program in each)
            for stage, each in enumerate(programs)
        ],
        cache_bytes=[
            sum(state.value.num_bytes({}) for program in each for state in program.caches) for each in programs
        ],
        channels=own.channels,
        watch=_watch(world, job, programs, run.stall_s, counters),
        counters=counters,
        window=(depth + 1) * len(job.ranks) + depth,
        tracer=tracer,
    )
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
        job.number,
        sorted(stream_links(dict(enumerate(programs)), len(programs)), key=lambda link: link.number),
        [holders | {FEEDER_STAGE: {FEEDER: world.names[FEEDER]}}],
        world.health.statuses,
        max(stall_s, _SHORTEST_STALL_BEATS * world.health.beat_s),
        own=counters,
    )


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


def place(
    world: World,
    graph: Graph,
    plan: Plan,
    load: LoadState,
    run: RunOptions,
    *,
    number: int = 0,
    tracer: FeederTracer | None = None,
    ranks: Mapping[str, int] | None = None,
    largest: Mapping[str, int] | None = None,
) -> Deployment:
    """Send every device its stages and return the pipelines to stream through.

    `ranks` has the rank of each device if known, `largest` the sizes of the largest microbatch except its rows, which
    are in the plan. Pipelines use job numbers from `number` on. Raises `PlanError` if the plan is for another model or
    names a missing device.
    """
    if graph.keeps_caches and (
        len(plan.pipelines) > 1 or any(len(pipeline.cut_sets) > 1 for pipeline in plan.pipelines)
    ):
        raise PlanError(
            f"{graph.model} keeps caches on its stages, so all microbatches must take the same route; plan with "
            "--no-replicas --no-alternate"
        )
    ranks = ranks if ranks is not None else ranks_of(world, plan.devices)
    further = {symbol: size for symbol, size in (largest or {}).items() if symbol != "batch"}
    sizes = graph.sizes(plan.microbatch_rows, **further)
    run = msgspec.structs.replace(run, depth=plan.depth)
    pipelines = [
        deploy_pipeline(
            world, programs, FromWeights(load), run, sizes=sizes, ranks=_holders(pipeline, ranks),
            number=number + index, runtimes=_runtimes(pipeline), order=order_of(pipeline), tracer=tracer, index=index,
        )
        for index, (pipeline, programs) in enumerate(zip(plan.pipelines, divide_plan(graph, plan), strict=True))
    ]  # fmt: skip
    return Deployment(world, pipelines, _order(plan))


def places_in_line(world: World, graph: Graph, num_stages: int) -> list[int]:
    """Return the rank of each stage of a line, in groups as even as possible.

    The driver's own device holds the first stage, or the last stage if results are larger than inputs, as in language
    models: the larger tensors then cross no link.

        images     [driver, stage 0] -> [stage 1] -> [stage 2] -> [driver]
        tokens     [driver] -> [stage 0] -> [stage 1] -> [driver, stage 2]
    """
    places = assign_stages(world, num_stages)
    sizes = graph.sizes(graph.fixed_batch or 1)
    taken = sum(value.num_bytes(sizes) for value in graph.tensor_inputs())
    given = sum(graph.values[output.name].num_bytes(sizes) for output in graph.outputs if isinstance(output, Ref))
    return sorted(places, key=lambda rank: rank == FEEDER) if given > taken else places


def place_bundle(world: World, folder: Path, run: RunOptions, *, number: int = 0) -> Deployment:
    """Deploy a bundle, each device reading its own part.

    Raises `ProgramError` for a damaged bundle, and `PlanError` as `place` does.
    """
    plan, interface = read_bundle(folder)
    ranks = ranks_of(world, plan.devices)
    sizes = {symbol: plan.microbatch_rows if symbol == "batch" else 1 for symbol in interface.symbols}
    run = msgspec.structs.replace(run, depth=plan.depth)
    pipelines = []
    for index, pipeline in enumerate(plan.pipelines):
        names = {ranks[stage.device]: stage.device for stage in pipeline.stages}
        source, order = FromBundle(folder, fingerprint(plan), names), order_of(pipeline)
        pipelines.append(
            deploy_pipeline(
                world, interfaces(interface, len(pipeline.stages), len(pipeline.cut_sets)), source, run, sizes=sizes,
                ranks=_holders(pipeline, ranks), number=number + index, runtimes=_runtimes(pipeline), order=order,
            )
        )  # fmt: skip
    return Deployment(world, pipelines, _order(plan))


def _order(plan: Plan) -> tuple[int, ...]:
    """Return the round-robin order of a plan's pipelines."""
    return round_robin([pipeline.share for pipeline in plan.pipelines])


def _holders(pipeline: PlannedPipeline, ranks: Mapping[str, int]) -> list[int]:
    """Return the rank of each stage."""
    return [ranks[stage.device] for stage in pipeline.stages]


def _runtimes(pipeline: PlannedPipeline) -> list[RuntimeChoice]:
    return [RuntimeChoice(stage.runtime, stage.precision, stage.keep) for stage in pipeline.stages]


def name_devices(world: World) -> dict[str, int]:
    """Return the rank of every device of a world by a name made from its host.

    More processes of the same host are `name:1`, `name:2` and so on.
    """
    places: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for rank in world.devices:
        host = world.hosts[rank]
        places[f"{host}:{seen[host]}" if seen[host] else host] = rank
        seen[host] += 1
    return places


def ranks_of(world: World, devices: Sequence[str]) -> dict[str, int]:
    """Find the rank of every device of a plan: the process on the host of the same name.

    More processes of the same host are `name:1`, `name:2` and so on. Workers that this process started, and processes
    without a host, are matched to the devices in order. Raises `PlanError` for a device without a process.
    """
    if world.workers is not None or not world.hosts:
        if len(devices) > len(world.devices):
            raise PlanError(
                f"the plan needs {len(devices)} processes, one per device; got {len(world.devices)}; start one for "
                "each device"
            )
        return dict(zip(devices, world.devices, strict=False))
    places = name_devices(world)
    missing = [name for name in devices if name not in places]
    if missing:
        raise PlanError(
            f"the plan uses {', '.join(missing)}, but the run's hosts are {', '.join(places)}; start it on the "
            "plan's cluster, or replan"
        )
    return {name: places[name] for name in devices}
