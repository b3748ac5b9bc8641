"""A graph divided into the programs of all stages: by sets of cuts, or by a plan.

Separate from `split` because workers need this module, while capturing, which they never do, takes long to import.
"""

from collections.abc import Collection, Sequence

import torch

from penstock.errors import PlanError, RunError
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph
from penstock.graph.program import StageProgram
from penstock.graph.stages import divide, graph_fingerprint
from penstock.group.world import World
from penstock.plan.check import check_cuts, check_plan, check_purpose
from penstock.plan.schedule.round_robin import round_robin
from penstock.spec.plan import Plan, PlannedPipeline


def divide_by_sets(graph: Graph, cut_sets: Sequence[Sequence[Cut]]) -> list[tuple[StageProgram, ...]]:
    """Return the programs of every stage, one for each set of cuts.

    Example:
        divide_by_sets(graph, [cuts.find_all(["blocks.5:after"])])
    """
    return list(zip(*(divide(graph, cuts) for cuts in cut_sets), strict=True))


def check_operators(world: World, ranks: Sequence[int], programs: Sequence[Collection[StageProgram]]) -> None:
    """Check that the operators of each stage are the same on its rank as in this process.

    Ranks may run another version of PyTorch. Raises `RunError` naming an operator that differs or is missing.
    """
    for rank, own in zip(ranks, programs, strict=True):
        targets = {op.target for program in own for op in (*program.prelude, *program.ops)}
        if unlike := sorted(targets & world.unlike.get(rank, frozenset())):
            raise RunError(
                f"{unlike[0]} differs or is missing in the PyTorch of {world.names[rank]}, and its stage calls "
                f"it; install the driver's PyTorch ({torch.__version__}) there"
            )


def divide_plan(graph: Graph, plan: Plan) -> list[list[tuple[StageProgram, ...]]]:
    """Return the programs of all stages for every pipeline of a plan.

    Raises `PlanError` if the plan is for another model or is inconsistent.
    """
    check_purpose(plan, trains=False)
    cuts = cuts_of_plan(graph, plan)
    return [
        divide_by_sets(graph, [cuts.find_all(each.cuts) for each in pipeline.cut_sets]) for pipeline in plan.pipelines
    ]


def cuts_of_plan(graph: Graph, plan: Plan) -> Cuts:
    """Return the possible cuts of a graph, including the plan's; raises `PlanError` as `divide_plan` does."""
    check_plan(plan)
    if plan.graph != graph_fingerprint(graph):
        raise PlanError(
            f"the plan is for the graph {plan.graph} of {plan.model}, but this model's is {graph_fingerprint(graph)}; "
            "profile and plan this model"
        )
    cuts = Cuts(graph)
    check_cuts(plan, [cut.name for cut in cuts])
    return cuts


def order_of(pipeline: PlannedPipeline) -> tuple[int, ...]:
    """Return the round-robin order of a pipeline's cut sets."""
    return round_robin([cut_set.weight for cut_set in pipeline.cut_sets])
