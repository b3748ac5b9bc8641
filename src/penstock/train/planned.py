"""A training that the planner arranges: what its profile must be, and its plans as grids and cuts."""

from collections.abc import Collection, Mapping

import msgspec

from penstock.engine.placement import Grid
from penstock.errors import PlanError
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph
from penstock.graph.stages import fingerprint
from penstock.plan.candidates import Request
from penstock.plan.choose import make_plan
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan, Schedule
from penstock.spec.profile import Profile
from penstock.train.arrangement import Arrangement, plan_grid
from penstock.train.captured import Captured


def check_profile(graph: Graph, profile: Profile) -> None:
    """Raise `PlanError` for a profile of another model, or one that does not say what training it takes."""
    if profile.graph != fingerprint(graph):
        raise PlanError(
            f"the profile is of the graph {profile.graph} of {profile.model}, but this model's is "
            f"{fingerprint(graph)}; profile this model as it trains, with --data or --training"
        )
    if any(unit.backward_s is None for unit in profile.units):
        raise PlanError("the profile has no backward seconds; profile with --training or --data")


def common_cuts(captured: Captured) -> Collection[str]:
    """Return the cuts that the model has in training and in evaluation, so that either part may be cut there."""
    evaluated = {name for cut in Cuts(captured.evaluation) for name in names_of(cut)}
    return {cut.name for cut in Cuts(captured.graph) if evaluated & set(names_of(cut))}


def names_of(cut: Cut) -> tuple[str, ...]:
    """Return all names of a place."""
    return (cut.name, *cut.aliases)


def plan_training(profile: Profile, cluster: Cluster, placed: Arrangement, *, rows: int, state_factor: float) -> Plan:
    """Return the fastest plan of a cluster for a training as it is: with its schedule, and as many microbatches.

    `rows` are those of a microbatch, `state_factor` the bytes of optimizer state for each byte of weights. Raises
    `PlanError` where nothing fits.
    """
    return make_plan(profile, cluster, Request(
        rows=(rows,), schedule=msgspec.convert(placed.schedule_name, Schedule), optimizer_state_factor=state_factor,
        num_microbatches=placed.all_microbatches, alternate=False,
    ))  # fmt: skip


def grid_of_plan(graph: Graph, plan: Plan, ranks: Mapping[str, int]) -> tuple[Grid, list[Cut]]:
    """Place a plan's pipelines on devices of these ranks; those that it leaves out are idle."""
    cuts = Cuts(graph)
    places = {name: cuts.find(name).position for p in plan.pipelines for name in p.cut_sets[0].cuts}
    grid, names = plan_grid(plan, ranks, places)
    return grid.with_idle(sorted(ranks.values())), cuts.find_all(names)
