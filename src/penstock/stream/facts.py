"""What a traced stream says of itself, beside what its processes recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

import msgspec

from penstock.deploy.deployment import Deployment, Replicas
from penstock.engine.observer import StreamReport
from penstock.graph.cuts import Cuts
from penstock.graph.graph import Graph
from penstock.graph.work import count_work
from penstock.spec.plan import Plan
from penstock.tracing.environment import environment
from penstock.tracing.trace import RunFacts, StageTotals


def stream_facts(
    deployment: Deployment | Replicas, report: StreamReport, *, model: str, cuts: Sequence[str], threads: int,
    plan: Plan | None = None, units: Sequence[tuple[str, float, float]] = (),
) -> RunFacts:  # fmt: skip
    """Describe a stream that has ended, for its run's folder."""
    parts = deployment.deployments
    world = deployment.world
    return RunFacts(
        kind="stream", model=model, cuts=tuple(cuts), threads=threads, depth=parts[0].job.depth,
        ranks=tuple(ranks.items[0] for part in parts for ranks in part.job.ranks),
        devices=tuple(world.names), hosts=tuple(world.hosts), bandwidths=tuple(world.bandwidths),
        num_microbatches=report.num_microbatches, num_rows=report.num_rows, total_s=report.total_s,
        results_s=tuple(report.results_s), stages=tuple(StageTotals(**asdict(stage)) for stage in report.stages),
        environment=environment(), plan=msgspec.to_builtins(plan) if plan is not None else None,
        units=tuple(units),
    )  # fmt: skip


def units_of(graph: Graph, sizes: Mapping[str, int]) -> list[tuple[str, float, float]]:
    """Return what lies between the possible cuts: the cut in front, the counted work, the bytes that cross there."""
    work = count_work(graph, sizes)
    cuts = list(Cuts(graph))
    bounds = [0, *(cut.position for cut in cuts), len(work)]
    inputs = float(sum(value.num_bytes(sizes) for value in graph.tensor_inputs()))
    fronts = [("input", inputs), *((cut.name, float(cut.num_bytes(sizes))) for cut in cuts)]
    return [(name, sum(work[a:b]), num) for (name, num), (a, b) in zip(fronts, pairwise(bounds), strict=True)]
