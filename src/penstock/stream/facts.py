"""What a traced stream says of itself, beside what its processes recorded."""

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
import torch

from penstock.engine.deployment import Deployment, Replicas
from penstock.engine.streaming import StreamReport
from penstock.spec.plan import Plan
from penstock.tracing.trace import RunFacts, StageTotals


def stream_facts(
    deployment: Deployment | Replicas, report: StreamReport, *, model: str, cuts: Sequence[str], threads: int,
    plan: Plan | None = None, serial_s: float | None = None,
) -> RunFacts:  # fmt: skip
    """Describe a stream that has ended, for its run's folder."""
    parts = deployment.deployments if isinstance(deployment, Replicas) else (deployment,)
    world = deployment.world
    return RunFacts(
        kind="stream", model=model, cuts=tuple(cuts), threads=threads, depth=parts[0].job.depth,
        ranks=tuple(rank for part in parts for rank in part.job.ranks),
        devices=tuple(world.names), hosts=tuple(world.hosts), bandwidths=tuple(world.bandwidths),
        num_microbatches=report.num_microbatches, num_rows=report.num_rows, total_s=report.total_s,
        results_s=tuple(report.results_s), stages=tuple(StageTotals(**asdict(stage)) for stage in report.stages),
        environment=environment(), plan=msgspec.to_builtins(plan) if plan is not None else None, serial_s=serial_s,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """Say what a run was made on: versions, machine, time."""
    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
