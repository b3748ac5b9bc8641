"""Costs of an elastic training run for the planner, measured unless given; plans converted to placements and back."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import msgspec
from torch import Tensor

from penstock.deploy.deployment import ranks_of
from penstock.deploy.policies import choose_cuts
from penstock.deploy.state import load_state
from penstock.elastic.options import ElasticOptions
from penstock.engine.placement import Grid
from penstock.engine.reference import calibrate
from penstock.errors import CutError, PlanError
from penstock.graph.cuts import Cuts, graph_fingerprint
from penstock.graph.ops import State
from penstock.measure.hosts import measure_messages
from penstock.measure.profiler import profile_graph
from penstock.plan.cost.frozen import keep_cuts
from penstock.resources import allowed_bytes
from penstock.spec.cluster import Cluster, Device
from penstock.spec.fields import fingerprint
from penstock.spec.plan import CutSet, DeviceLoad, Plan, PlannedPipeline, PlannedStage, Prediction
from penstock.spec.profile import Profile
from penstock.terminal.progress import working
from penstock.text import note
from penstock.train.arrangement import Arrangement, check_profile, common_cuts, grid_of_plan, names_of
from penstock.train.captured import Captured
from penstock.train.migration import assign, interchangeable, missing_bytes
from penstock.train.trainer import Trainer
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER

_CALIBRATION_S = 0.5
_MESSAGES = 20  # number of messages timed to measure their cost
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class PlannerInputs:
    """Inputs of the planner, on the driver: the model's profile, the cluster, and the rank of each device."""

    profile: Profile
    cluster: Cluster
    ranks: dict[str, int]


def find_costs(trainer: Trainer, captured: Captured, options: ElasticOptions, rows: int) -> PlannerInputs | None:
    """Measure the inputs that are not given; returns all inputs on the driver, None on other ranks.

    `captured` is the whole model, with no layer frozen; `rows` are the rows of a microbatch. All processes call this
    and measure their devices at the same time, so that contention between them is included; the driver alone measures
    the model. Raises `PlanError` if the profile is of another model or lacks backward times, or if the cluster does not
    match this run.
    """
    world = trainer.world
    given, cluster = options.read_profile(), options.read_cluster()
    if given is not None:
        check_profile(captured.graph, given)
    ranks = {f"rank{rank}": rank for rank in world.devices}
    if cluster is not None:
        ranks = ranks_of(world, [device.name for device in cluster.devices])
        if len(ranks) < len(world.devices):
            raise PlanError(
                f"the cluster must have {len(world.devices)} devices, one per process; got {len(ranks)}; give all of "
                "them"
            )
    with working("measuring the devices", shown=world.rank == FEEDER):
        round_s = calibrate(_CALIBRATION_S) if cluster is None else 0.0
        told = all_gather(world.transport, {"round_s": round_s, "memory": allowed_bytes()})
    if world.rank != FEEDER:
        return None
    if given is None:
        note(f"measuring {captured.graph.model}; give a profile to skip this")
    with working("measuring the model"):
        profile = given or measure_profile(captured, trainer.now.placed, rows, told[FEEDER]["round_s"])
    reference_s = profile.calibration_s or told[FEEDER]["round_s"]
    if cluster is None:
        devices = [
            Device(
                name=name,
                speed=reference_s / told[rank]["round_s"],
                memory_bytes=told[rank]["memory"],
                bandwidth_bytes_per_s=world.bandwidths[rank],
            )
            for name, rank in ranks.items()
        ]
        cluster = Cluster(devices=tuple(devices))
    return PlannerInputs(keep_cuts(profile, common_cuts(captured)), cluster, ranks)


def measure_profile(captured: Captured, placed: Arrangement, rows: int, calibration_s: float) -> Profile:
    """Measure the model for microbatches of `rows` rows, and the cost of messages on this machine.

    The profile has the cuts after each layer and those of the current placement.
    """
    at = {name: cut for cut in Cuts(captured.graph) for name in names_of(cut)}
    # these may be cuts of the frozen model: find them by name, and skip cuts that the whole model lacks
    placed_at = [at[name] for cut in placed.cuts for name in names_of(cut) if name in at]
    cuts = sorted({c.position: c for c in (*placed_at, *captured.layers)}.values(), key=lambda cut: cut.position)

    def load(state: State) -> Tensor:
        return load_state(captured.graph, state, captured.weights)

    profile = profile_graph(
        captured.graph,
        load,
        rows=(rows,),
        repeats=_REPEATS,
        training=True,
        cuts=cuts,
        messages=measure_messages(num_microbatches=_MESSAGES),
    )
    return msgspec.structs.replace(profile, calibration_s=calibration_s)


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
