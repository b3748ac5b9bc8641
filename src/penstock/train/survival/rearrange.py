"""The grid for the processes that remain: chosen by the planner or their number, and placed so that few bytes move.

A part is the stages that one rank holds in a placement.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.deploy.deployment import name_devices
from penstock.deploy.policies import choose_cuts
from penstock.deploy.run_options import OnLoss
from penstock.engine.placement import Grid, Replica
from penstock.errors import CutError, DeviceLost
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.freeze import sources_in
from penstock.plan.choose import cluster_among
from penstock.plan.cost.frozen import keep_cuts
from penstock.plan.cost.training_step import ADAMW_STATE
from penstock.spec.cluster import Cluster, Device
from penstock.spec.profile import Profile
from penstock.train.arrangement import Arrangement, common_cuts, grid_of_plan, plan_training
from penstock.train.captured import Captured
from penstock.train.held_tensors import HeldTensors
from penstock.train.trainer import Trainer
from penstock.wire import FEEDER

_ALIKE = 0.05  # relative measurement error of speeds and memory sizes


def missing_bytes(
    placed: Arrangement, captured: Captured, tensors: HeldTensors, ranks: Sequence[int], state_factor: float
) -> list[list[float]]:
    """Return `missing[device][part]` for `assign`: the bytes that a rank lacks to take over a part of a placement.

    For a trained tensor the optimizer's state is added: `state_factor` times the tensor's size.
    """
    bounds = [0, *(cut.position for cut in placed.cuts), len(captured.graph.ops)]
    sizes = {
        state.source: state.value.num_bytes({}) * (1 + state_factor * (state.source in captured.trainable))
        for state in captured.graph.states
        if state.kind != "constant"
    }
    of_stage = [sources_in(captured.graph, start, end) for start, end in pairwise(bounds)]
    needs = [
        set[str]().union(*(of_stage[stage] for stage in placed.grid.stages_of(part))) & sizes.keys() for part in ranks
    ]
    holders = {name: set(tensors.holders(name)) for name in sizes}
    return [
        [sum(sizes[name] for name in needs[part] if device not in holders[name]) for part in range(len(ranks))]
        for device in ranks
    ]


def assign(missing: Sequence[Sequence[float]], alike: Sequence[Sequence[int]]) -> list[int]:
    """Return the device of each part, chosen to move few bytes: equivalent devices may swap parts.

    `missing[device][part]` is the number of bytes of a part that a device lacks; `alike` are groups of devices that may
    swap parts. Pairs are swapped as long as that reduces the total.

    >>> assign([[9, 0], [0, 9]], [[0, 1]])
    [1, 0]
    """
    taken = list(range(len(missing)))  # the device of each part
    better = True
    while better:
        better = False
        for group in alike:
            for i, first in enumerate(group):
                for second in group[i + 1 :]:
                    one, other = taken[first], taken[second]
                    now = missing[one][first] + missing[other][second]
                    if missing[other][first] + missing[one][second] < now:
                        taken[first], taken[second] = other, one
                        better = True
    return taken


def interchangeable(devices: Sequence[Device]) -> list[list[int]]:
    """Group devices that may swap parts: with equal bandwidth and, within measurement error, equal speed and memory."""
    groups: list[list[int]] = []
    for number, device in enumerate(devices):
        for group in groups:
            first = devices[group[0]]
            if (
                math.isclose(first.speed, device.speed, rel_tol=_ALIKE)
                and math.isclose(first.memory_bytes, device.memory_bytes, rel_tol=_ALIKE)
                and first.bandwidth_bytes_per_s == device.bandwidth_bytes_per_s
            ):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def write_grid(grid: Grid) -> list[dict[str, object]]:
    """Encode a grid as JSON values."""
    return [
        {"devices": list(r.devices), "stages": list(r.stages), "num_microbatches": r.num_microbatches}
        for r in grid.replicas
    ]


def read_grid(encoded: Sequence[Mapping[str, Any]]) -> Grid:
    """Decode the result of `write_grid`."""
    return Grid(
        tuple(Replica(tuple(each["devices"]), tuple(each["stages"]), each["num_microbatches"]) for each in encoded)
    )


def lost_names(captured: Captured, tensors: HeldTensors) -> Collection[str]:
    """Return the names of model state that no process holds any longer."""
    states = (state for state in captured.graph.states if state.kind != "constant")
    return [state.source for state in states if not tensors.holders(state.source)]


def cuts_here(captured: Captured, names: Sequence[str]) -> list[Cut]:
    """Find cuts by the names that rank 0 sent; raises `DeviceLost` if this process's model lacks one."""
    try:
        return Cuts(captured.graph).find_all(names)
    except CutError as error:
        raise DeviceLost(f"this process cannot apply the placement of rank 0: {error}") from error


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
    taken = assign(missing_bytes(placed, trainer.now.captured, trainer.now.tensors, ranks, ADAMW_STATE), groups)
    return grid.renumbered(dict(zip(ranks, taken, strict=True))), cuts


def _planned(
    trainer: Trainer, begun: Arrangement, profile: Profile, known: Cluster
) -> tuple[Grid, Sequence[Cut], Sequence[Sequence[int]]]:
    """Return the planner's grid and cuts for these devices, and groups of ranks that may swap parts."""
    ranks = name_devices(trainer.world)
    cluster = cluster_among(known, list(ranks), feeder=trainer.world.hosts[FEEDER])
    batch = trainer.data.trained
    rows = profile.rows[-1] if batch is None else max(1, len(batch.samples) // begun.all_microbatches)
    costs = keep_cuts(profile, common_cuts(trainer.now.captured))
    plan = plan_training(costs, cluster, begun, rows=rows, state_factor=ADAMW_STATE)
    return *grid_of_plan(trainer.now.captured.graph, plan, ranks), interchangeable(cluster.devices)


def _by_number(trainer: Trainer, begun: Arrangement, num_processes: int) -> tuple[Grid, Sequence[Cut]]:
    """Return a grid for a number of processes, and its cuts: the initial grid, or as many replicas as fit."""
    grid = begun.grid if num_processes == len(begun.grid.ranks) else begun.shape(num_processes)
    first = grid.replicas[0]
    if len(first.stages) == begun.num_stages:
        return grid, begun.cuts
    graph = trainer.now.captured.graph
    return grid, choose_cuts(
        graph, Cuts(graph), stages=len(first.stages), places=[first.devices.index(rank) for rank in first.stages]
    )
