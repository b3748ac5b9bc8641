"""Deployment of a plan: its stages, with their cut sets and replicas, on the devices that it names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.deploy.bundle import LoadState, interfaces, read_bundle
from penstock.deploy.deployment import Deployment, deploy_pipeline
from penstock.deploy.jobs import FromBundle, FromWeights
from penstock.deploy.policies import divide_plan, order_of
from penstock.deploy.run_options import RunOptions
from penstock.engine.tracers import FeederTracer
from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.graph.ops import Ref
from penstock.group.world import World, assign_stages
from penstock.plan.schedule.round_robin import round_robin
from penstock.runtime.registry import RuntimeChoice
from penstock.spec.fields import fingerprint
from penstock.spec.plan import Plan, PlannedPipeline
from penstock.wire import FEEDER


def place(
    world: World, graph: Graph, plan: Plan, load: LoadState, run: RunOptions, *, number: int = 0,
    tracer: FeederTracer | None = None, ranks: Mapping[str, int] | None = None,
    largest: Mapping[str, int] | None = None,
) -> Deployment:  # fmt: skip
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
