"""A plan for training put in place: which process is which device, and where the model is cut."""

from penstock.deploy.placing import ranks_of
from penstock.deploy.programs import cuts_of_plan
from penstock.engine.placement import Grid
from penstock.errors import PlanError, UsageError
from penstock.graph.graph import Graph
from penstock.group.world import World
from penstock.spec.check import check_purpose
from penstock.spec.plan import Plan
from penstock.train.grids import plan_grid


def place_training(world: World, graph: Graph, plan: Plan) -> tuple[Grid, list[str]]:
    """Find the processes for a plan's devices; gives the grid and the names of the cuts.

    Raises `PlanError` for a plan for inference or of another model, and where processes and devices do not agree.
    """
    check_purpose(plan, trains=True)
    cuts = cuts_of_plan(graph, plan)
    ranks = ranks_of(world, plan.devices)
    if len(ranks) < len(world.devices):
        raise PlanError(
            f"the plan uses {len(ranks)} devices, {', '.join(plan.devices)}, but {len(world.devices)} processes train; "
            "start one on each of them"
        )
    return plan_grid(plan, ranks, {cut.name: cut.position for cut in cuts})


def check_alone(plan: Plan | None, **given: object) -> None:
    """Raise `UsageError` where what a plan says is given beside it."""
    twice = [name for name, value in given.items() if value is not None]
    if plan is not None and twice:
        raise UsageError(f"a plan says its {' and '.join(twice)}; leave {'it' if len(twice) == 1 else 'them'} out")
