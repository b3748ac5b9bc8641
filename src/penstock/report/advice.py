"""Advice: replanning with a run's measurements, and devices near their memory limit."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from penstock.errors import PenstockError
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import choose
from penstock.plan.cost.predict import predict
from penstock.plan.explain import what_would_help
from penstock.report.stream_account import Account, stream_costs
from penstock.report.stream_measured import MeasuredStream, share
from penstock.spec.cluster import Cluster, Device
from penstock.spec.fields import as_name
from penstock.spec.plan import CutSet, Plan, PlannedPipeline, PlannedStage
from penstock.spec.profile import Boundary, Profile, Unit
from penstock.tracing.trace import ProcessTrace, Run
from penstock.units import format_bytes

_WORTH = 0.01
# a run does not record free memory
_ANY_MEMORY = 2**50


@dataclass(frozen=True, slots=True)
class Advice:
    """Sentences about a run: findings, and recommendations."""

    known: tuple[str, ...]
    to_do: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """All sentences."""
        return self.known + self.to_do


def advise(run: Run, stream: MeasuredStream, account: Account) -> Advice:
    """Replan with the measurements, and describe the outcome.

    Example:
        print("\\n".join(advise(run, stream, make_account(run)).lines))
    """
    known, to_do = [account.advice], list[str]()
    if len(run.facts.units) < 2 or len(run.facts.ranks) != len(set(run.facts.ranks)):
        return Advice((*known, "The planner has no advice: the run has no times of the units between its cuts."))
    profile, cluster = observed_profile(run, stream), observed_cluster(run, stream)
    rows = max(1, run.facts.num_rows // max(1, run.facts.num_microbatches))
    request = PlanRequest(
        rows=(rows,), num_rows=run.facts.num_rows, depth=run.facts.depth, replicas=len(stream.routes) > 1
    )
    try:
        choice = choose(profile, cluster, request)
        helps = what_would_help(choice, profile, cluster, request)
        now = predict(_as_it_ran(choice.plan, run, cluster), profile, cluster, num_rows=run.facts.num_rows)
    except PenstockError as error:
        return Advice((*known, f"The planner finds no plan: {error}."))
    measured = run.facts.num_rows / run.facts.total_s
    predicted, reached = (plan.prediction.num_rows / plan.prediction.total_s for plan in (now, choice.plan))
    # a plan is better if it beats both the prediction and the measurement of this run by more than these differ
    off, gain = abs(predicted / measured - 1), reached / max(predicted, measured) - 1
    if gain > max(off, _WORTH):
        pipeline = choice.plan.pipelines[0]
        sets = len(pipeline.cut_sets)
        cuts = ", ".join(pipeline.cut_sets[0].cuts) or "no cut"
        rotation = f" and {sets - 1} other cut sets in rotation" if sets > 1 else ""
        to_do.append(
            f"Planned for what was measured, the cuts would be {cuts}{rotation}: {reached:.4g} rows/s predicted for "
            f"these {run.facts.num_rows} rows, where {predicted:.4g} are predicted for this run and {measured:.4g} "
            f"were measured ({gain:+.1%}); the pace would be set by {choice.plan.prediction.limit}."
        )
    else:
        known.append(
            f"Other cuts are not worth trying: {reached:.4g} rows/s are predicted for them ({gain:+.1%}), where "
            f"{predicted:.4g} are predicted for this run and {measured:.4g} were measured ({off:.1%} off)."
        )
    useful = [item for item in helps if item.gain > max(off, _WORTH) and "memory" not in item.change][:3]
    to_do += [f"With {item.change}: {item.rows_per_s:.4g} rows/s steady ({item.gain:+.1%})." for item in useful]
    return Advice(tuple(known), tuple(to_do))


def _as_it_ran(like: Plan, run: Run, cluster: Cluster) -> Plan:
    """Return the plan of a run on the observed devices; other fields are taken from `like`."""
    pipelines = []
    names = [device.name for device in cluster.devices]
    for place, route in enumerate(run.facts.routes):
        planned = run.facts.plan["pipelines"][place] if run.facts.plan is not None else None
        sets = planned["cut_sets"] if planned is not None else [{"cuts": run.facts.cuts}]
        part = sum(run.facts.pipeline_of(m) == place for m in range(run.facts.num_microbatches))
        pipelines.append(
            PlannedPipeline(
                stages=tuple(PlannedStage(device=names[index]) for index in route),
                cut_sets=msgspec.convert(sets, tuple[CutSet, ...]),
                share=part / run.facts.num_microbatches,
            )
        )
    return msgspec.structs.replace(like, pipelines=tuple(pipelines))


def observed_profile(run: Run, stream: MeasuredStream) -> Profile:
    """Return a profile with counted work, scaled so that the units of each stage add up to its seconds alone."""
    units = run.facts.units
    places = {name: index for index, (name, _, _) in enumerate(units)}
    bounds = [0, *(places[cut] for cut in run.facts.cuts if cut in places), len(units)]
    if len(bounds) != len(stream.stages) + 1:  # cut sets in rotation: the same factor for all stages
        bounds = [0, len(units)]
    seconds: list[float] = []
    stages = list(stream.stages)
    for number, (first, last) in enumerate(pairwise(bounds)):
        held = [stages[number]] if len(bounds) == len(stages) + 1 else stages
        taken = sum(stage.share * stage.alone_s * share(stage.machine) for stage in held)
        work = sum(unit[1] for unit in units[first:last]) or 1.0
        seconds += [unit[1] * taken / work for unit in units[first:last]]
    rows = max(1, run.facts.num_rows // max(1, run.facts.num_microbatches))
    names = _distinct([unit[0] for unit in units])
    out = stream.stages[-1].mean("num_bytes_out")
    boundaries = [Boundary(name=n, bytes_per_row=u[2] / rows) for n, u in zip(names, units, strict=True)]
    costs = stream_costs(stream, run.facts.threads)
    return Profile(
        model=run.facts.model,
        graph="0" * 16,
        device="observed",
        threads=run.facts.threads,
        rows=(rows,),
        boundaries=(*boundaries, Boundary(name="output", bytes_per_row=out / rows)),
        units=tuple(Unit(forward_s=(s,)) for s in seconds),
        send_s_per_byte=statistics.fmean(s.machine.byte_s for s in stream.stages),
        receive_s_per_byte=statistics.fmean(s.machine.byte_s for s in stream.stages),
        stage_overhead_s=statistics.fmean(costs[s.index].fixed_s * share(s.machine) for s in stream.stages),
    )


def observed_cluster(run: Run, stream: MeasuredStream) -> Cluster:
    """Return devices with their observed speeds: a device that other processes slowed down counts as slow."""
    devices = []
    names = [as_name(stage.device) for stage in stream.stages]
    for stage, own in zip(stream.stages, names, strict=True):
        slowed = min(1.0, stage.alone_s / stage.mean("compute_s")) if stage.mean("compute_s") else 1.0
        known = run.facts.bandwidths[stage.rank] if stage.rank < len(run.facts.bandwidths) else None
        name = as_name(f"stage {stage.index} on {stage.device}") if names.count(own) > 1 else own
        devices.append(
            Device(
                name=name, speed=share(stage.machine) * slowed, memory_bytes=_ANY_MEMORY, bandwidth_bytes_per_s=known
            )
        )
    return Cluster(devices=tuple(devices))


def _distinct(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


# a device that uses more than this fraction of its memory may run out at the next larger input
NEAR = 0.85
# usable fraction of a sufficiently large memory
_ROOM = 0.7


def advise_memory(run: Run) -> list[str]:
    """Describe each device near its memory limit, with its usage, its limit, and a sufficient memory.

    Processes of one host share its memory; shared libraries are counted for each process.
    """
    hosts: dict[str, list[ProcessTrace]] = {}
    for process in run.processes:
        known = process.rank < len(run.facts.hosts)
        hosts.setdefault(run.facts.hosts[process.rank] if known else process.device, []).append(process)
    lines = []
    for host, processes in hosts.items():
        held = sum(process.peak_bytes for process in processes)
        limit = max(process.machine.memory_bytes for process in processes)
        if limit and held > NEAR * limit:
            stages = [str(s) for s, rank in enumerate(run.facts.ranks) if rank in {p.rank for p in processes}]
            lines.append(
                f"{host} (stage {', '.join(stages)}) reached {format_bytes(held)} of its {format_bytes(limit)} of "
                f"memory ({held / limit:.0%}): give it {format_bytes(held / _ROOM)}, a smaller stage or smaller "
                "microbatches."
            )
    return lines
