"""Choice of a training run's grid for the current processes: by the planner, or by their number alone."""

from collections.abc import Sequence

from penstock.deploy.placing import name_devices
from penstock.deploy.policies import choose_cuts
from penstock.deploy.run_options import OnLoss
from penstock.engine.placement import Grid
from penstock.graph.cuts import Cut, Cuts
from penstock.plan.choose import cluster_among
from penstock.plan.cost.frozen import keep_cuts
from penstock.plan.cost.training_step import ADAMW_STATE
from penstock.spec.cluster import Cluster
from penstock.spec.profile import Profile
from penstock.train.arrangement import Arrangement
from penstock.train.planned import common_cuts, grid_of_plan, plan_training
from penstock.train.survival.rearrange import assign, interchangeable, missing_bytes
from penstock.train.trainer import Trainer
from penstock.wire import FEEDER


def choose_grid(trainer: Trainer, begun: Arrangement, options: OnLoss) -> tuple[Grid, Sequence[Cut]]:
    """Return grid and cuts for the current group, with parts assigned to ranks that already hold most of their tensors.

    Raises `PlanError` if no plan fits the devices.
    """
    ranks = list(range(trainer.world.transport.size))
    groups: Sequence[Sequence[int]] = [ranks]
    if options.profile is not None and options.cluster is not None:
        grid, cuts, groups = _planned(trainer, begun, options.profile, options.cluster)
    else:
        grid, cuts = _by_number(trainer, begun, len(ranks))
    placed = begun.moved(grid, cuts, rank=FEEDER)
    taken = assign(missing_bytes(placed, trainer.captured, trainer.tensors, ranks, ADAMW_STATE), groups)
    return grid.renumbered(dict(zip(ranks, taken, strict=True))), cuts


def _planned(
    trainer: Trainer, begun: Arrangement, profile: Profile, known: Cluster
) -> tuple[Grid, Sequence[Cut], Sequence[Sequence[int]]]:
    """Return the planner's grid and cuts for these devices, and groups of ranks that may swap parts."""
    ranks = name_devices(trainer.world)
    cluster = cluster_among(known, list(ranks), feeder=trainer.world.hosts[FEEDER])
    batch = trainer.data.trained
    rows = profile.rows[-1] if batch is None else max(1, len(batch.samples) // begun.all_microbatches)
    costs = keep_cuts(profile, common_cuts(trainer.captured))
    plan = plan_training(costs, cluster, begun, rows=rows, state_factor=ADAMW_STATE)
    return *grid_of_plan(trainer.captured.graph, plan, ranks), interchangeable(cluster.devices)


def _by_number(trainer: Trainer, begun: Arrangement, num_processes: int) -> tuple[Grid, Sequence[Cut]]:
    """Return a grid for a number of processes, and its cuts: the initial grid, or as many replicas as fit."""
    grid = begun.grid if num_processes == len(begun.grid.ranks) else begun.shape(num_processes)
    first = grid.replicas[0]
    if len(first.stages) == begun.num_stages:
        return grid, begun.cuts
    graph = trainer.captured.graph
    return grid, choose_cuts(
        graph, Cuts(graph), stages=len(first.stages), places=[first.devices.index(rank) for rank in first.stages]
    )
