"""A training run that follows a plan: what the plan says, and what is not to be said beside it."""

from penstock.errors import UsageError
from penstock.recipes.settings import DEFAULT_SCHEDULE, FitSettings
from penstock.spec.check import check_purpose, read_plan
from penstock.spec.plan import Plan
from penstock.train.arrangement import check_given_once


def plan_of(settings: FitSettings) -> Plan | None:
    """Read the plan that a run follows, or return None for a run without one.

    Raises `PlanError` for a plan for inference, `UsageError` where the settings say something else than the plan.
    """
    if settings.plan is None:
        return None
    plan = read_plan(settings.plan)
    check_purpose(plan, trains=True)
    check_given_once(
        plan, stages=settings.stages, replicas=settings.replicas, devices=settings.devices,
        microbatches=settings.microbatches, cuts=settings.cuts,
    )  # fmt: skip
    if settings.schedule not in {DEFAULT_SCHEDULE, plan.schedule}:
        raise UsageError(f"the plan's schedule is {plan.schedule}, not {settings.schedule}; leave --schedule out")
    if settings.batch_size != plan.batch_rows:
        raise UsageError(
            f"the plan is for batches of {plan.batch_rows} rows, not {settings.batch_size}; leave --batch-size out, or "
            f"plan again with --batch-size {settings.batch_size}"
        )
    return plan


def num_processes(settings: FitSettings, plan: Plan | None) -> int:
    """Count the processes that a run takes, started by itself."""
    return settings.num_processes if plan is None else len(plan.devices)
