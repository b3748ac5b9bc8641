"""Cuts of a model, by name, by a policy or of a plan, and the stage programs between them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import torch

from penstock.errors import CutError, PlanError, RunError
from penstock.graph.cuts import Cut, Cuts, divide, find_blocks, graph_fingerprint, parameter_pieces
from penstock.graph.graph import SECONDS_PER_CROSSING_BYTE, Graph, count_work
from penstock.graph.program import StageProgram
from penstock.group.world import World
from penstock.plan.check import check_cuts, check_plan, check_purpose
from penstock.plan.schedule.round_robin import round_robin
from penstock.plan.search import partition
from penstock.plan.search.partition import balanced_devices
from penstock.spec.plan import Plan, PlannedPipeline

Policy = Literal["balanced", "equal-blocks", "equal-size", "smallest-crossing"]
POLICIES: tuple[str, ...] = get_args(Policy)


def choose_cuts(
    graph: Graph,
    cuts: Cuts,
    *,
    stages: int,
    names: Sequence[str] | None = None,
    policy: str = "balanced",
    work: Sequence[float] | None = None,
    sizes: Mapping[str, int] | None = None,
    places: Sequence[int] | None = None,
) -> list[Cut]:
    """Find cuts by names or, without names, choose them for a number of stages by a policy.

    - `balanced`: the least work in the largest stage, or on the busiest device if devices hold several stages;
    - `smallest-crossing`: the fewest crossing bytes, if the largest stage has at most 10% more work than if balanced;
    - `equal-blocks`: the same number of repeated blocks in every stage;
    - `equal-size`: stages filled up to an equal share of the parameters, as PiPPy does.

    `work` is seconds per operation of the graph, counted from shapes by default; `sizes` are those of the microbatch,
    by default one row; `places` are the devices of the stages, by default a separate device for each. Raises `CutError`
    for a name or policy that is unknown or that this model does not allow.
    """
    if names is not None:
        return cuts.find_all(names)
    sizes = sizes or graph.sizes(graph.fixed_batch or 1)
    work = work if work is not None else count_work(graph, sizes)
    if policy not in POLICIES:
        raise CutError(
            f"cuts must be a list of names, such as blocks.5:after, or one of {', '.join(POLICIES)}; got {policy!r}"
        )
    partition.check_stages(len(cuts) + 1, stages)
    if stages == 1:
        return []
    if policy in {"balanced", "smallest-crossing"}:
        choose: Callable[..., list[int]] = partial(partition.balanced, slack=0.10)
        if policy == "balanced":
            several = places is not None and len(set(places)) < stages
            choose = partial(balanced_devices, places=places or ()) if several else partition.balanced
        return _choose_among(list(cuts), choose, graph, work, sizes, stages)
    if policy == "equal-blocks":
        return _equal_blocks(graph, cuts, work, stages)
    return _equal_size(graph, cuts, work, stages)


def best_blocks(graph: Graph, cuts: Cuts, *, stages: int, sizes: Mapping[str, int]) -> list[Cut]:
    """Choose cuts between whole blocks that minimize the largest stage, by counted work.

    Raises `CutError` if the model has no repeated blocks, or fewer than stages.
    """
    work = count_work(graph, sizes)
    starts = {_nearest_cut(cuts, span.start) for span in find_blocks(graph, work)[1:]}
    among = sorted(starts, key=lambda cut: cut.position)
    return _choose_among(among, partition.balanced, graph, work, sizes, stages)


def _choose_among(
    cuts: Sequence[Cut],
    choose: Callable[..., list[int]],
    graph: Graph,
    work: Sequence[float],
    sizes: Mapping[str, int],
    stages: int,
) -> list[Cut]:
    """Choose among cuts with a function of `plan.search.partition`; each crossing byte counts as work on both sides."""
    bounds = [0, *(cut.position for cut in cuts), len(graph.ops)]
    units = [sum(work[a:b]) for a, b in pairwise(bounds)]
    crossing = [0, *(cut.num_bytes(sizes) for cut in cuts), 0]
    return [cuts[b - 1] for b in choose(units, crossing, stages, work_per_byte=SECONDS_PER_CROSSING_BYTE)]


def _equal_blocks(graph: Graph, cuts: Cuts, work: Sequence[float], stages: int) -> list[Cut]:
    starts = [span.start for span in find_blocks(graph, work)]
    chosen = [_nearest_cut(cuts, position) for position in partition.evenly(starts, stages)]
    if len({cut.position for cut in chosen}) < len(chosen):
        raise CutError(
            f"{graph.model} allows no cut between some of its blocks and cannot have {stages} stages of whole "
            "blocks; use fewer stages or the policy 'balanced'"
        )
    return chosen


def _equal_size(graph: Graph, cuts: Cuts, work: Sequence[float], stages: int) -> list[Cut]:
    try:
        blocks = find_blocks(graph, work)
    except CutError:  # without blocks every operation with parameters is a piece
        blocks = []
    starts, sizes = parameter_pieces(graph, blocks)
    chosen = [_nearest_cut(cuts, starts[boundary]) for boundary in partition.fill(sizes, stages)]
    distinct = sorted({cut.position for cut in chosen})
    if len(distinct) != stages - 1:
        raise CutError(
            f"single blocks of {graph.model} are too large for {stages} stages of equal size; use fewer stages or "
            "the policy 'balanced'"
        )
    return [cuts.at(position) for position in distinct]


def _nearest_cut(cuts: Cuts, position: int) -> Cut:
    """Return the cut at a position, or the nearest allowed one."""
    return min(cuts, key=lambda cut: abs(cut.position - position))


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
