"""Put a plan in place: its stages, with their cut sets and replicas, on the devices that it names."""

from collections.abc import Sequence

from penstock.engine.deployment import Deployment, Replicas
from penstock.engine.jobs import LoadState
from penstock.engine.progress import STALL_S
from penstock.engine.split import divide_in_turns
from penstock.engine.world import World
from penstock.errors import PlanError
from penstock.graph.cuts import Cuts
from penstock.graph.graph import Graph
from penstock.graph.stages import fingerprint
from penstock.plan.turns import turns
from penstock.spec.check import check_cuts, check_plan
from penstock.spec.plan import Plan


def place(
    world: World, graph: Graph, plan: Plan, load: LoadState, *, threads: int, number: int = 0, stall_s: float = STALL_S
) -> Replicas:
    """Send every device its stages and give what streams through them.

    Pipelines take jobs from `number` on. Raises `PlanError` where the plan is of another model, names a device
    that is not there, or has stages that several devices share, which this version does not run.
    """
    check_plan(plan)
    if plan.graph != fingerprint(graph):
        raise PlanError(
            f"the plan is for the graph {plan.graph} of {plan.model}, but this model's is {fingerprint(graph)}; "
            "profile and plan this model"
        )
    cuts = Cuts(graph)
    check_cuts(plan, [cut.name for cut in cuts])
    ranks = ranks_of(world, plan.devices)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if len(stage.devices) > 1:
                raise PlanError(
                    f"a stage runs on one device, but {', '.join(stage.devices)} share one in this plan; "
                    "plan with --no-shared"
                )
    sizes = graph.sizes(plan.microbatch_rows)
    deployments = []
    for index, pipeline in enumerate(plan.pipelines):
        order = turns([cut_set.weight for cut_set in pipeline.cut_sets])
        programs = divide_in_turns(graph, [cuts.find_all(each.cuts) for each in pipeline.cut_sets], order)
        places = [ranks[stage.devices[0]] for stage in pipeline.stages]
        deployments.append(
            Deployment(
                world, programs, load, sizes=sizes, threads=threads, ranks=places, number=number + index,
                depth=plan.depth, stall_s=stall_s,
            )
        )  # fmt: skip
    return Replicas(deployments, turns([pipeline.share for pipeline in plan.pipelines]))


def ranks_of(world: World, devices: Sequence[str]) -> dict[str, int]:
    """Find the rank of every device of a plan: the process on the host of that name.

    Workers that this process has started stand for the devices in order. Raises `PlanError` for a device that has
    no process.
    """
    if world.workers is not None:
        if len(devices) > len(world.devices):
            raise PlanError(f"the plan uses {len(devices)} devices, but there are {len(world.devices)} workers")
        return dict(zip(devices, world.devices, strict=False))
    places = {world.hosts[rank]: rank for rank in reversed(world.devices)}
    missing = [name for name in devices if name not in places]
    if missing:
        raise PlanError(
            f"the plan uses {', '.join(missing)}, but the run's hosts are {', '.join(places)}; "
            "start it on the cluster that it was made for, or plan again"
        )
    return {name: places[name] for name in devices}
