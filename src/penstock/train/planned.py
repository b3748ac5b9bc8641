"""Planning of a training run: validation of its profile, and conversion of plans to grids and cuts."""

from collections.abc import Collection, Mapping

from penstock.engine.placement import Grid
from penstock.errors import PlanError
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph
from penstock.graph.stages import graph_fingerprint
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import make_plan
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile
from penstock.train.arrangement import Arrangement, plan_grid
from penstock.train.captured import Captured


def check_profile(graph: Graph, profile: Profile) -> None:
    """Raise `PlanError` if the profile is of another model or has no backward times."""
    if profile.graph != graph_fingerprint(graph):
        raise PlanError(
            f"the profile is of the graph {profile.graph} of {profile.model}, but this model's is "
            f"{graph_fingerprint(graph)}; profile this model in training mode, with --data or --training"
        )
    if any(unit.backward_s is None for unit in profile.units):
        raise PlanError("the profile has no backward seconds; profile with --training or --data")


def common_cuts(captured: Captured) -> Collection[str]:
    """Return the cuts that both the training and the evaluation graph allow."""
    return {cut.name for cut in captured.common_cuts()}


def names_of(cut: Cut) -> tuple[str, ...]:
    """Return all names of a cut."""
    return (cut.name, *cut.aliases)


def plan_training(profile: Profile, cluster: Cluster, placed: Arrangement, *, rows: int, state_factor: float) -> Plan:
    """Return a cluster's fastest plan with the run's current schedule and number of microbatches.

    `rows` are the rows of a microbatch, `state_factor` the bytes of optimizer state per byte of weights. Raises
    `PlanError` if no plan fits.
    """
    return make_plan(profile, cluster, PlanRequest(
        rows=(rows,), schedule=placed.schedule_name, optimizer_state_factor=state_factor,
        num_microbatches=placed.all_microbatches, alternate=False,
    ))  # fmt: skip


def grid_of_plan(graph: Graph, plan: Plan, ranks: Mapping[str, int]) -> tuple[Grid, list[Cut]]:
    """Place a plan's pipelines on these ranks, given by device; ranks that the plan does not use are idle."""
    cuts = Cuts(graph)
    places = {name: cuts.find(name).position for p in plan.pipelines for name in p.cut_sets[0].cuts}
    grid, names = plan_grid(plan, ranks, places)
    return grid.with_idle(sorted(ranks.values())), cuts.find_all(names)
