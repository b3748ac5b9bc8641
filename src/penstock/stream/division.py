"""A model as it will stream: cut, or given as modules; put in place, or served by a process that does not feed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from penstock.deploy.bundle import LoadState
from penstock.deploy.deployment import Deployment, Replicas
from penstock.deploy.jobs import read_stages, receive_stages
from penstock.deploy.modules import advising, chain, runtime_maker, start_threads
from penstock.deploy.options import CutOptions, ModelCall, RunOptions
from penstock.deploy.placing import place
from penstock.deploy.policies import choose_cuts
from penstock.deploy.programs import divide_in_turns
from penstock.deploy.serving import OwnStages
from penstock.deploy.sources import FromModules, FromWeights, MakeRuntime
from penstock.deploy.state import load_state
from penstock.engine.executor import serve_stream
from penstock.engine.tracers import FeederTracer, follow_stages
from penstock.errors import TransportError, UsageError
from penstock.graph.call import bind_inputs
from penstock.graph.capture import capture
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph
from penstock.graph.program import StageProgram
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.runtime.eager import StageRuntime
from penstock.spec.plan import Plan
from penstock.transport.messages import CLOSE
from penstock.zoo.weights.weights import ModuleWeights

_STAGES = 4  # where neither the caller nor a world says how many


class Division(Protocol):
    """A model in stages that are not in any process yet."""

    @property
    def graph(self) -> Graph:
        """The whole model."""
        ...

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Where it is cut; none between modules that are stages as they are."""
        ...

    def start_world(self) -> World:
        """Start what the stages can run in, where nothing has."""
        ...

    def deploy(self, world: World, threads: int, tracer: FeederTracer | None) -> Deployment | Replicas:
        """Put the stages where they will stream."""
        ...


def divide_model(call: ModelCall, cut: CutOptions, run: RunOptions, world: World | None) -> Division:
    """Divide a model as its caller asked, for as many devices as a world has, if there is one.

    Raises `UsageError` for a model that is missing and for options that do not go together, and what
    `penstock.split` raises.
    """
    if isinstance(call.model, Sequence):
        return _Chained(call.model, call, cut, run)
    if not isinstance(call.model, nn.Module):
        raise UsageError("the process that feeds needs the model; pass it to Pipeline")
    with advising(call.model):
        graph = capture(call.model, call.args, call.kwargs, dynamic=call.dynamic)
    load = partial(load_state, graph, weights=call.weights or ModuleWeights(call.model))
    if cut.plan is not None:
        cuts = tuple(Cuts(graph).find_all(cut.plan.pipelines[0].cut_sets[0].cuts))
        return _Planned(graph, cuts, load, run, cut.plan)
    stages = cut.stages or (len(world.devices) if world else _STAGES)
    chosen = choose_cuts(graph, Cuts(graph), names=cut.cuts, stages=stages, policy=cut.policy)
    return _Divided(graph, tuple(chosen), load, run, bind_inputs(graph, call.args, call.kwargs)[1])


@dataclass(frozen=True, slots=True)
class _Divided:
    """Stages between cuts."""

    graph: Graph
    cuts: tuple[Cut, ...]
    load: LoadState
    run: RunOptions
    sizes: Mapping[str, int]

    def start_world(self) -> World:
        return start_local(len(self.cuts) + 1)

    def deploy(self, world: World, threads: int, tracer: FeederTracer | None) -> Deployment:
        return Deployment(
            world, divide_in_turns(self.graph, [self.cuts]), FromWeights(self.load),
            replace(self.run, threads=threads), sizes=self.sizes, tracer=tracer,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Planned:
    """Pipelines as a plan has them; its cuts are those of its first pipeline's first cut set."""

    graph: Graph
    cuts: tuple[Cut, ...]
    load: LoadState
    run: RunOptions
    plan: Plan

    def start_world(self) -> World:
        return start_local(len(self.plan.devices))

    def deploy(self, world: World, threads: int, tracer: FeederTracer | None) -> Replicas:
        return place(world, self.graph, self.plan, self.load, replace(self.run, threads=threads), tracer=tracer)


class _Chained:
    """Modules that are stages as they are, each called with what the one before returned."""

    cuts: tuple[Cut, ...] = ()

    def __init__(self, modules: Sequence[nn.Module], call: ModelCall, cut: CutOptions, run: RunOptions) -> None:
        if run.device != "cpu":
            raise UsageError("a list of modules computes where they lie; move them, and leave device out")
        if cut.cuts is not None or cut.stages not in {None, len(modules)}:
            raise UsageError(f"a list of {len(modules)} modules is that many stages; leave stages and cuts out")
        self._run = run
        self.graph, self._programs = chain(modules, call.args, call.kwargs)
        self._make_one: Callable[[int, StageProgram], StageRuntime] = runtime_maker(modules, self.graph)
        _, self._sizes = bind_inputs(self.graph, call.args, call.kwargs)

    def start_world(self) -> World:
        return start_threads(len(self._programs), self._make_one)

    def deploy(self, world: World, threads: int, tracer: FeederTracer | None) -> Deployment:
        return Deployment(
            world, self._programs, FromModules(self._make_one), replace(self._run, threads=threads),
            sizes=self._sizes, tracer=tracer,
        )  # fmt: skip


class ServedStages:
    """Stages and weights from the process that feeds, or modules that this process has; `make` then makes runtimes.

    Raises the reason why they cannot be had, once the other processes have been told of it.
    """

    def __init__(self, world: World, make: MakeRuntime | None) -> None:
        self._world = world
        self.closed = False
        try:
            job, runtimes = read_stages(world, receive_stages(world.transport), make)
            torch.set_num_threads(job.threads)
            own = self._own = OwnStages(world, job, runtimes)
            self._stream_ended = follow_stages(world, job, own.stages, own.channels, own.observer)
        except TransportError as error:
            raise world.explain(error) from error
        except Exception as error:
            world.health.report(error)
            raise

    def serve(self) -> None:
        """Work until a stream has ended, or the stages are closed."""
        own = self._own
        try:
            self.closed = serve_stream(own.schedule(), own.stages, own.channels, own.observer) == CLOSE
            if not self.closed:
                self._stream_ended()
        except TransportError as error:
            raise self._world.explain(error) from error
        except Exception as error:
            self._world.health.report(error)
            raise

    def serve_to_end(self) -> None:
        """Work until the stages are closed."""
        while not self.closed:
            self.serve()
