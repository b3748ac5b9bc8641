"""Division of a model for streaming: cut, or given as modules; deployed by the driver, served by a worker."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import nn

from penstock.deploy.bundle import LoadState, interface_graph, read_bundle
from penstock.deploy.deployment import Deployment, deploy_pipeline, name_devices, place, place_bundle, places_in_line
from penstock.deploy.jobs import FromModules, FromWeights, MakeRuntime, Source, read_stages, receive_stages
from penstock.deploy.modules import advising, chain, runtime_maker, start_threads
from penstock.deploy.policies import choose_cuts, divide_by_sets
from penstock.deploy.run_options import Bundle, CutOptions, ModelCall, RunOptions
from penstock.deploy.state import Holdings, load_state, with_packings
from penstock.deploy.worker import BUNDLE
from penstock.engine.executor import OwnStages
from penstock.engine.tracers import FeederTracer, follow_stages
from penstock.errors import PenstockError, UsageError, exclude
from penstock.graph.call import bind_inputs
from penstock.graph.capture import capture
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph
from penstock.graph.live_module import LiveModule, version_of
from penstock.graph.program import StageProgram
from penstock.group.entry import start_local, thread_worlds
from penstock.group.regroup import release, renew
from penstock.group.world import World, assign_stages
from penstock.measure.profiler import counted_profile
from penstock.runtime.registry import EAGER
from penstock.runtime.torch_settings import applied
from penstock.spec.fields import as_name
from penstock.spec.plan import Plan, PlannedStage, Precision
from penstock.stream.replanner import Replanner
from penstock.stream.survival import SurvivingDeployment
from penstock.text import note
from penstock.transport.messages import CLOSE
from penstock.zoo.weights.weights import ModuleWeights

_STAGES = 4  # default if neither the caller nor the world sets a number


@dataclass(frozen=True, slots=True)
class Division:
    """A model in stages that are not deployed yet.

    `cuts` is empty for a list of modules, and for a plan the first cut set of its first pipeline. `start_world` starts
    a world if the caller has none; `deploy` deploys the stages in a world, with a number of threads per stage.
    """

    graph: Graph
    cuts: tuple[Cut, ...]
    start_world: Callable[[], World]
    deploy: Callable[[World, int, FeederTracer | None], Deployment]


def divide_model(call: ModelCall, cut: CutOptions, run: RunOptions, world: World | None) -> Division:
    """Divide a model by the caller's options; if there is a world, for its number of devices.

    Raises `UsageError` for a missing model and for options that exclude each other, and as `penstock.split` does.
    """
    if isinstance(call.model, Sequence):
        return _chained(call.model, call, cut, run)
    if isinstance(call.model, Bundle):
        return _bundled(call.model.folder, run)
    if not isinstance(call.model, nn.Module):
        raise UsageError("the driver needs the model; pass it to Pipeline")
    with advising(call.model):
        graph = capture(call.model, call.args, call.kwargs, dynamic=call.dynamic, largest=call.largest)
    _, sizes = bind_inputs(graph, call.args, call.kwargs)
    weights = call.weights or ModuleWeights(call.model)
    graph = with_packings(graph, weights, [str(run.runtime)] if cut.plan is None else cut.plan.runtimes)
    load = partial(load_state, graph, weights=weights)
    if (plan := cut.plan) is not None:
        exclude("runtime", run.runtime != EAGER, "a plan determines the runtime of its stages")
        cuts = tuple(Cuts(graph).find_all(plan.pipelines[0].cut_sets[0].cuts))
        num_devices, deploy = len(plan.devices), _planned(run, graph, plan, load, sizes)
    else:
        stages = cut.count(len(world.devices) if world else _STAGES)
        places = places_in_line(world, graph, stages) if world else None
        cuts = tuple(choose_cuts(graph, Cuts(graph), names=cut.names, stages=stages, policy=cut.policy, places=places))
        deploy = _line(
            run,
            divide_by_sets(graph, [cuts]),
            FromWeights(load),
            sizes,
            lambda world: places_in_line(world, graph, len(cuts) + 1),
        )
        num_devices = len(cuts) + 1
    survives = run.on_loss.survives
    start_world: Callable[[], World] = partial(start_local, num_devices, again=survives)
    if graph.keeps_caches and num_devices == 1 and not survives:
        start_world = _this_process  # messages to a worker would take time in each step of a generation
    return Division(
        graph, cuts, start_world, _surviving(cut, run, graph, load, cuts, deploy, sizes) if survives else deploy
    )


def _this_process() -> World:
    (world,) = thread_worlds(["this process"])
    return world


def _planned(
    run: RunOptions, graph: Graph, plan: Plan, load: LoadState, sizes: Mapping[str, int]
) -> Callable[[World, int, FeederTracer | None], Deployment]:
    """Return a function that deploys the stages of a plan."""

    def deploy(world: World, threads: int, tracer: FeederTracer | None) -> Deployment:
        return place(
            world, graph, plan, load, msgspec.structs.replace(run, threads=threads), tracer=tracer, largest=sizes
        )

    return deploy


def _surviving(
    cut: CutOptions,
    run: RunOptions,
    graph: Graph,
    load: LoadState,
    cuts: Sequence[Cut],
    deploy: Callable[[World, int, FeederTracer | None], Deployment],
    sizes: Mapping[str, int],
) -> Callable[[World, int, FeederTracer | None], SurvivingDeployment]:
    """Return a function that deploys stages that survive the loss of devices."""
    rows, options = sizes.get("batch", 1), run.on_loss
    found = options.profile

    def survive(world: World, threads: int, tracer: FeederTracer | None) -> SurvivingDeployment:
        replanner = Replanner(
            cut.plan,
            lambda: found if found is not None else counted_profile(graph, rows),
            options.cluster,
            one_way=graph.keeps_caches,
        )
        ranks = name_devices(world)
        if world.workers is not None:  # the workers represent a plan's devices, in order
            names = cut.plan.devices if cut.plan is not None else [as_name(world.names[rank]) for rank in world.devices]
            ranks = dict(zip(names, world.devices, strict=True))
        if cut.plan is None:
            _describe(replanner, run, cuts, places_in_line(world, graph, len(cuts) + 1), ranks, rows)

        def put(world: World, plan: Plan, ranks: Mapping[str, int], number: int) -> Deployment:
            asked = msgspec.structs.replace(run, threads=threads)
            return place(world, graph, plan, load, asked, number=number, ranks=ranks, largest=sizes)

        asked_for = cut.plan is not None or cut.cuts is not None
        return SurvivingDeployment(
            world, lambda: deploy(world, threads, tracer), ranks, replanner, put, options, adapts=not asked_for
        )

    return survive


def _describe(
    replanner: Replanner,
    run: RunOptions,
    cuts: Sequence[Cut],
    places: Sequence[int],
    ranks: Mapping[str, int],
    rows: int,
) -> None:
    """Describe a placement that was made without a plan to a replanner; cuts within a device are left out."""
    by_rank = {rank: name for name, rank in ranks.items()}
    between = [cut.name for cut, before, after in zip(cuts, places, places[1:], strict=False) if before != after]
    devices = [by_rank[rank] for rank in dict.fromkeys(places)]
    runtime = run.runtime
    stage = PlannedStage(
        device="", runtime=runtime.name, precision=cast(Precision, runtime.precision), keep=runtime.keep
    )
    replanner.begin(between, devices, rows, run.depth, stage)


def _chained(modules: Sequence[nn.Module], call: ModelCall, cut: CutOptions, run: RunOptions) -> Division:
    """Use modules as stages, each called with the output of the previous module."""
    exclude("runtime", run.runtime != EAGER, "a list of modules runs as it is")
    exclude("device", run.device != "cpu", "modules of a list compute on their own devices, to which you move them")
    exclude("on_loss", run.on_loss.survives, "modules of a list cannot migrate, so a lost stage cannot be replaced")
    differs = cut.cuts is not None or cut.stages not in {None, len(modules)}
    exclude("stages and cuts", differs, f"a list of {len(modules)} modules is one stage per module")
    graph, programs = chain(modules, call.args, call.kwargs)
    _, sizes = bind_inputs(graph, call.args, call.kwargs)
    make = runtime_maker(modules, graph)
    start_world = partial(start_threads, len(programs), make)
    in_order = partial(assign_stages, num_stages=len(programs))
    return Division(graph, (), start_world, _line(run, programs, FromModules(make), sizes, in_order))


def _bundled(folder: Path, run: RunOptions) -> Division:
    """Use the parts of a bundle, which the devices of its plan read."""
    plan, interface = read_bundle(folder)

    def deploy(world: World, threads: int, _tracer: FeederTracer | None) -> Deployment:
        return place_bundle(world, folder, msgspec.structs.replace(run, threads=threads))

    start_world = partial(start_local, len(plan.devices), {BUNDLE: str(folder)})
    return Division(interface_graph(interface), (), start_world, deploy)


def _line(
    run: RunOptions,
    programs: Sequence[Sequence[StageProgram]],
    source: Source,
    sizes: Mapping[str, int],
    places: Callable[[World], Sequence[int]],
) -> Callable[[World, int, FeederTracer | None], Deployment]:
    """Return a function that deploys successive stages, for microbatches up to the example's size."""

    def deploy(world: World, threads: int, tracer: FeederTracer | None) -> Deployment:
        asked = msgspec.structs.replace(run, threads=threads)
        pipeline = deploy_pipeline(world, programs, source, asked, sizes=sizes, ranks=places(world), tracer=tracer)
        return Deployment(world, [pipeline])

    return deploy


class ServedStages:
    """Stages that this process runs: received from the driver, its own modules, or its part of a bundle.

    `make` creates the runtimes of modules; `bundle` is the folder of the bundle.

    An error that prevents this process from running them is reported to the other processes, then raised.
    """

    def __init__(self, world: World, make: MakeRuntime | None, bundle: Path | None = None) -> None:
        self._world, self._make, self._bundle, self._holdings = world, make, bundle, Holdings()
        self.closed = False
        self._take()

    def _take(self) -> None:
        """Receive this process's stages, at the start and again in each further group."""
        while True:
            try:
                with self._world.explained():
                    job = receive_stages(self._world.transport)
                    found = read_stages(self._world, job, self._make, self._bundle, self._holdings)
                    torch.set_num_threads(job.threads)
                    self._own = OwnStages(self._world, job, *found)
                    self._stream_ended = follow_stages(self._own)
                return
            except PenstockError:
                if not self._go_on():
                    raise

    def serve(self) -> None:
        """Serve until a stream has ended or the stages are closed; if a rank is lost, continue in a further group."""
        while True:
            try:
                with self._world.explained():
                    with applied(self._own.job.torch_settings):
                        self.closed = self._own.serve_stream() == CLOSE
                    if not self.closed:
                        self._stream_ended()
                return
            except PenstockError:
                if not self._go_on():
                    raise
                self._take()

    def _go_on(self) -> bool:
        """Join the run's next group; return False if there is none."""
        if self._world.membership is None:
            return False
        release(self._world.transport.inner, self._world.health)
        return renew(self._world)

    def serve_to_end(self) -> None:
        """Serve streams until the stages are closed."""
        while not self.closed:
            self.serve()


class StreamedModule:
    """A model as it was when its stages were made; held weakly, so that the caller may release its memory."""

    def __init__(self, model: nn.Module, graph: Graph, *, reads_weights: bool) -> None:
        self._name = graph.model
        self._live = LiveModule(model, graph.reads, graph.left)
        # by owner, since a parameter or a buffer may be replaced by another one
        self._weights = [
            (weakref.ref(module), name, weakref.ref(tensor), version_of(tensor))
            for module in (model.modules() if reads_weights else ())
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]

    def check_unchanged(self) -> None:
        """Print a note once if the model's weights changed, which the stages do not follow.

        Raises `UsageError` if its modules, hooks or attributes changed.
        """
        if what := self._live.rebuilt() or self._live.changed():
            raise UsageError(
                f"{what}, but the stages compute what was captured; change {self._name} before, or make a new pipeline"
            )
        if self._has_other_weights():
            self._weights = []
            note(
                f"the weights of {self._name} changed after its pipeline was made, which streams with those that it "
                "had then; to use the new ones, make a new pipeline"
            )

    def _has_other_weights(self) -> bool:
        """Return True if a tensor was written to or replaced; not if the model has ended, or is on the meta device."""
        for module, name, tensor, version in self._weights:
            owner = module()
            now = None if owner is None else owner._parameters.get(name, owner._buffers.get(name))
            released = owner is None or (now is not None and now.device.type == "meta")
            if not released and (now is None or now is not tensor() or version_of(now) != version):
                return True
        return False
