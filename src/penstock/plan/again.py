"""Plan again when something is seen to be different: a device that is gone, new, or slower than thought."""

from collections.abc import Collection, Mapping

import msgspec

from penstock.errors import PlanError
from penstock.plan.candidates import fits
from penstock.plan.choose import make_plan
from penstock.plan.cost.predict import predict
from penstock.plan.request import Request
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile


def plan_again(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    speeds: Mapping[str, float] | None = None,
    missing: Collection[str] = (),
    worth: float = 0.02,
) -> Plan:
    """Return the plan for a cluster as it is now; the old one with new predictions where a new one gains too little.

    `speeds` are devices' speeds as observed, in multiples of the profiled device's; `missing` are devices that
    are gone; a device that is new stands in the cluster already. A new plan must be faster by more than `worth`
    (0.02 is 2%), since to change plans moves weights. Microbatch size, depth and schedule stay.

    Example:
        plan = plan_again(plan, profile, cluster, speeds={"board2": 0.2}, missing={"board3"})

    A pure function: the same arguments give the same plan, and nothing is changed. Raises `PlanError` where
    nothing fits any more or the feeder is gone, `ClusterError` for names that the cluster does not have.
    """
    now = observed(cluster, speeds or {}, missing)
    request = request_of(plan)
    kept = None
    if not set(plan.devices) & set(missing):
        stays = msgspec.structs.replace(plan, loader=now.feeding.name, writer=now.feeding.name)
        kept = predict(stays, profile, now)
    fresh = make_plan(profile, now, request)
    if kept is None or not fits(kept.prediction, now):
        return fresh
    if fresh.prediction.rows_per_s > kept.prediction.rows_per_s * (1 + worth):
        return fresh
    return msgspec.structs.replace(kept, profile=fresh.profile, cluster=fresh.cluster)


def observed(cluster: Cluster, speeds: Mapping[str, float], missing: Collection[str]) -> Cluster:
    """Return the cluster as it is seen to be; raises `ClusterError` for unknown names, `PlanError` without the feeder.

    Example:
        observed(cluster, {"board2": 0.2}, {"board3"})
    """
    for name in (*speeds, *missing):
        cluster.device(name)
    feeder = cluster.feeding.name
    if feeder in missing:
        raise PlanError(f"{feeder} feeds and is gone; name another feeder in the cluster file and start again there")
    return msgspec.structs.replace(cluster.at_speeds(speeds), feeder=feeder).without(missing)


def request_of(plan: Plan) -> Request:
    """Return the request that asks for a plan like this one: same microbatches, depth and schedule."""
    return Request(
        rows=(plan.microbatch_rows,), num_rows=plan.prediction.num_rows, depth=plan.depth, schedule=plan.schedule,
        num_microbatches=plan.num_microbatches, optimizer_state_factor=plan.optimizer_state_factor,
        alternate=plan.schedule == "forward-only",
    )  # fmt: skip
