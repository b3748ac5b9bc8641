"""Conversion between plans and placements of an elastic training run."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby, pairwise

from penstock.deploy.policies import choose_cuts
from penstock.elastic.costs import PlannerInputs
from penstock.engine.placement import Grid
from penstock.errors import CutError, PlanError
from penstock.graph.cuts import Cuts, graph_fingerprint
from penstock.spec.fields import fingerprint
from penstock.spec.plan import CutSet, DeviceLoad, Plan, PlannedPipeline, PlannedStage, Prediction
from penstock.train.arrangement import Arrangement, grid_of_plan
from penstock.train.captured import Captured
from penstock.train.survival.rearrange import assign, interchangeable, missing_bytes
from penstock.train.trainer import Trainer


def plan_of(placed: Arrangement, costs: PlannerInputs, captured: Captured, *, rows: int, state_factor: float) -> Plan:
    """Convert a placement to a plan, with placeholders as its prediction; stages that do not run are left out.

    `rows` are the rows of a microbatch, `state_factor` the elements of optimizer state per element of weights. Cuts
    that the profile lacks are replaced by its nearest cuts.
    """
    names = {rank: name for name, rank in costs.ranks.items()}
    cuts = _known(placed, costs, captured)
    total = placed.all_microbatches
    pipelines = []
    for replica in placed.grid.replicas:
        ranks = replica.stages[placed.skipped :]
        own = tuple(cut for cut, (before, after) in zip(cuts, pairwise(ranks), strict=True) if before != after)
        stages = tuple(PlannedStage(device=names[rank]) for rank, _ in groupby(ranks))
        pipelines.append(
            PlannedPipeline(stages=stages, cut_sets=(CutSet(cuts=own),), share=(replica.num_microbatches or 0) / total)
        )
    used = dict.fromkeys(stage.device for p in pipelines for stage in p.stages)
    feeder = costs.cluster.feeding.name
    return Plan(
        model=captured.graph.model, graph=graph_fingerprint(captured.graph), profile=fingerprint(costs.profile),
        cluster=fingerprint(costs.cluster), microbatch_rows=rows, pipelines=tuple(pipelines), loader=feeder,
        writer=feeder, schedule=placed.schedule_name, num_microbatches=total,
        optimizer_state_factor=state_factor,
        prediction=Prediction(
            rows_per_s=1.0, bound_rows_per_s=1.0, latency_s=1.0, num_rows=rows * total, total_s=1.0, limit=feeder,
            devices=tuple(DeviceLoad(device=name, load_s=1.0, memory_bytes=1.0) for name in used),
        ),
    )  # fmt: skip


def _known(placed: Arrangement, costs: PlannerInputs, captured: Captured) -> list[str]:
    """Return the profile's names of the cuts between stages that run."""
    cuts = Cuts(captured.graph)
    positions = {name: cuts.find(name).position for name in costs.profile.cuts}
    found: list[str] = []
    for cut in placed.cuts[placed.skipped :]:
        free = [name for name in positions if not found or positions[name] > positions[found[-1]]]
        if cut.name in free:  # by name, since positions may be those of a frozen model
            found.append(cut.name)
            continue
        if not free:
            raise PlanError(
                f"{placed.num_stages} stages do not fit the {len(positions)} cuts that the planner knows; use fewer "
                "stages"
            )
        found.append(min(free, key=lambda name: abs(positions[name] - cut.position)))
    return found


def arrangement_of(
    placed: Arrangement, captured: Captured, plan: Plan, ranks: Mapping[str, int], *, cached_layers: int = 0
) -> Arrangement:
    """Return the placement of a plan, for a model whose first `cached_layers` layers do not run.

    The device with the first running stage also holds these layers, for evaluation. Devices that the plan does not use
    are idle.
    """
    grid, found = grid_of_plan(captured.graph, plan, ranks)
    if cached_layers:
        found = [Cuts(captured.graph).find(captured.layers[cached_layers - 1].name), *found]
        grid = Grid(tuple(replace(r, stages=(r.stages[0], *r.stages)) for r in grid.replicas))
    return placed.moved(grid, found, skipped=int(cached_layers > 0))


def same_places(trainer: Trainer, captured: Captured) -> Arrangement:
    """Return the current placement, adapted to `captured`, which has more or fewer layers frozen; all layers run.

    A cut that the model no longer has is replaced by the nearest existing one; the distance of two cuts is the
    difference between the fractions of all operations that precede them.
    """
    placed, cuts = trainer.now.placed, Cuts(captured.graph)
    old = len(trainer.now.captured.graph.ops)
    found = []
    for cut in placed.cuts[placed.skipped :]:
        try:
            found.append(cuts.find(cut.name))
        except CutError:
            found.append(min(cuts, key=lambda each: abs(each.position / len(captured.graph.ops) - cut.position / old)))
    if len({cut.position for cut in found}) < len(found):
        found = choose_cuts(captured.graph, cuts, stages=len(found) + 1)
    replicas = tuple(replace(r, stages=r.stages[placed.skipped :]) for r in placed.grid.replicas)
    return placed.moved(Grid(replicas), found)


def near(
    trainer: Trainer, captured: Captured, plan: Plan, costs: PlannerInputs, *, cached_layers: int, state_factor: float
) -> dict[str, int]:
    """Assign a rank to each device of a plan so that few bytes migrate.

    Ranks on identical devices may take each other's places.

    The bytes to receive include the optimizer's state: `state_factor` times the bytes of the trained weights.
    """
    placed = arrangement_of(trainer.now.placed, captured, plan, costs.ranks, cached_layers=cached_layers)
    names = sorted(costs.ranks, key=lambda name: costs.ranks[name])
    ranks = [costs.ranks[name] for name in names]
    missing = missing_bytes(placed, captured, trainer.now.tensors, ranks, state_factor)
    taken = assign(missing, interchangeable([costs.cluster.device(name) for name in names]))
    return {name: ranks[device] for name, device in zip(names, taken, strict=True)}
