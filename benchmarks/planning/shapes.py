"""The best plan of a shape: how many stages each of the pipelines side by side has."""

from penstock.plan.candidates import PlanRequest, as_candidate, candidates_of
from penstock.plan.choose import write_down
from penstock.plan.cost.problem import Problem
from penstock.plan.search.replicas import best_steps
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile


def plan_of_shape(
    profile: Profile, cluster: Cluster, shape: tuple[int, ...], batch: int, schedule: str = "1f1b"
) -> Plan:
    """Return the best plan of a shape, AdamW included, for batches of `batch` rows."""
    request = PlanRequest(schedule=schedule, batch_rows=batch, optimizer_state_factor=2.0, replicas=False)
    (setting,) = request.settings(profile)
    problem, total = Problem(profile, cluster, setting), setting.num_microbatches or 1
    if len(shape) == 1:
        found = [c for c in candidates_of(problem, request) if (c.num_devices,) == shape]
    else:
        ways = [(d, n) for _, d, n in best_steps(problem) if sorted(map(len, d)) == sorted(shape)]
        shares = [[(count / total, division) for division, count in zip(*way, strict=True)] for way in ways]
        found = [as_candidate(problem, "replicas", share, request, exact=False) for share in shares]
    best = max(found, key=lambda candidate: candidate.prediction.rows_per_s)
    return write_down(best, profile, cluster, request)
