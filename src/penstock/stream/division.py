"""A model as it will stream: cut by a policy, by hand, by a plan, or given as modules; then put in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import nn

from penstock.deploy.bundle import LoadState
from penstock.deploy.deployment import Deployment, Replicas
from penstock.deploy.modules import advising, chain, runtime_maker, start_threads
from penstock.deploy.placing import place
from penstock.deploy.policies import choose_cuts
from penstock.deploy.programs import divide_in_turns
from penstock.deploy.state import load_state
from penstock.engine.tracers import FeederTracer
from penstock.errors import UsageError
from penstock.graph.call import bind_inputs
from penstock.graph.capture import capture
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph
from penstock.graph.program import StageProgram
from penstock.group.entry import start_local
from penstock.group.world import World
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.eager import StageRuntime
from penstock.spec.plan import Plan
from penstock.zoo.weights.weights import ModuleWeights, Weights

_STAGES = 4  # where neither the caller nor a world says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a caller of `Pipeline` asked for; None where the model or the world decides."""

    stages: int | None
    policy: str
    cuts: Sequence[str] | None
    plan: Plan | None
    weights: Weights | None
    dynamic: Mapping[str, Mapping[str | int, int]] | None
    threads: int | None
    depth: int
    stall_s: float
    computes_on: str


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

    def deploy(self, world: World, wanted: Wanted, threads: int, tracer: FeederTracer | None) -> Deployment | Replicas:
        """Put the stages where they will stream."""
        ...


def divide_model(
    model: nn.Module | Sequence[nn.Module] | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None,
    wanted: Wanted, world: World | None,
) -> Division:  # fmt: skip
    """Divide a model as its caller wanted, for as many devices as a world has, if there is one.

    Raises `UsageError` for a model that is missing and for wishes that do not go together, and what
    `penstock.split` raises.
    """
    if model is None:
        raise UsageError("the process that feeds needs the model; pass it to Pipeline")
    if not isinstance(model, nn.Module):
        return _Chained(model, args, kwargs or {}, wanted)
    with advising(model):
        graph = capture(model, args, kwargs, dynamic=wanted.dynamic)
    load = partial(load_state, graph, weights=wanted.weights or ModuleWeights(model))
    if wanted.plan is not None:
        cuts = tuple(Cuts(graph).find_all(wanted.plan.pipelines[0].cut_sets[0].cuts))
        return _Planned(graph, cuts, load, wanted.plan)
    _, sizes = bind_inputs(graph, args, kwargs or {})
    return _Divided(graph, _choose(graph, wanted, world), load, sizes)


def _choose(graph: Graph, wanted: Wanted, world: World | None) -> tuple[Cut, ...]:
    possible = Cuts(graph)
    if wanted.cuts is not None:
        return tuple(possible.find_all(wanted.cuts))
    count = wanted.stages or (len(world.devices) if world else _STAGES)
    return tuple(choose_cuts(graph, possible, stages=count, policy=wanted.policy))


@dataclass(frozen=True, slots=True)
class _Divided:
    """Stages between cuts."""

    graph: Graph
    cuts: tuple[Cut, ...]
    load: LoadState
    sizes: Mapping[str, int]

    def start_world(self) -> World:
        return start_local(len(self.cuts) + 1)

    def deploy(self, world: World, wanted: Wanted, threads: int, tracer: FeederTracer | None) -> Deployment:
        return Deployment(
            world, divide_in_turns(self.graph, [self.cuts]), self.load, sizes=self.sizes, threads=threads,
            depth=wanted.depth, stall_s=wanted.stall_s, computes_on=wanted.computes_on, tracer=tracer,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Planned:
    """Pipelines as a plan has them; its cuts are those of its first pipeline's first cut set."""

    graph: Graph
    cuts: tuple[Cut, ...]
    load: LoadState
    plan: Plan

    def start_world(self) -> World:
        return start_local(len(self.plan.devices))

    def deploy(self, world: World, wanted: Wanted, threads: int, tracer: FeederTracer | None) -> Replicas:
        return place(
            world, self.graph, self.plan, self.load, threads=threads, stall_s=wanted.stall_s,
            computes_on=wanted.computes_on, tracer=tracer,
        )  # fmt: skip


class _Chained:
    """Modules that are stages as they are, each called with what the one before gave."""

    cuts: tuple[Cut, ...] = ()

    def __init__(
        self, modules: Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Wanted
    ) -> None:
        if wanted.computes_on != "cpu":
            raise UsageError("a list of modules computes where they lie; move them, and leave device out")
        if wanted.cuts is not None or wanted.stages not in {None, len(modules)}:
            raise UsageError(f"a list of {len(modules)} modules is that many stages; leave stages and cuts out")
        self.graph, self._programs = chain(modules, args, kwargs)
        self._make_one = runtime_maker(modules, self.graph)
        _, self._sizes = bind_inputs(self.graph, args, kwargs)

    def start_world(self) -> World:
        return start_threads(len(self._programs), self._make_one)

    def deploy(self, world: World, wanted: Wanted, threads: int, tracer: FeederTracer | None) -> Deployment:
        return Deployment(
            world, self._programs, None, make=self._make, sizes=self._sizes, threads=threads, depth=wanted.depth,
            stall_s=wanted.stall_s, tracer=tracer,
        )  # fmt: skip

    def _make(self, index: int) -> RoundRobin[StageRuntime]:
        programs: RoundRobin[StageProgram] = self._programs[index]
        return programs.map(partial(self._make_one, index))
