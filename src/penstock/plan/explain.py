"""Explanation of a plan: loads, bottleneck, runner-up, and the most useful changes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec

from penstock.errors import PlanError
from penstock.plan.candidates import Candidate, PlanRequest
from penstock.plan.choose import Choice, choose
from penstock.plan.cost.predict import divisions_of
from penstock.plan.cost.training_step import play_step
from penstock.plan.needs import with_one_more
from penstock.spec.cluster import Cluster, Device, Link
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile
from penstock.text import counted
from penstock.units import format_bytes, format_rate, format_seconds

_Linked = TypeVar("_Linked", Device, Link)
_BAR = 30
# with many devices, replanning for every possible change would take longer than the planning itself
_MAX_TRIED_DEVICES = 16
_STEADY = 0.01  # passes of a profile that differ by less get no line


@dataclass(frozen=True, slots=True)
class Help:
    """A change to the cluster, and the throughput of a plan after the change."""

    change: str
    rows_per_s: float
    gain: float


def explain(choice: Choice, cluster: Cluster, helps: list[Help]) -> list[str]:
    """Return the explanation of a choice as lines of text.

    Example:
        print("\\n".join(explain(choice, cluster, what_would_help(choice, profile, cluster, request))))
    """
    lines = [summary(choice.plan), *load_lines(choice.plan, cluster)]
    lines.append(f"the pace is set by {choice.plan.prediction.limit}")
    if (caches := choice.plan.generation) is not None:
        kept = float(choice.best.problem.costs.kept_bytes[-1]) / choice.best.rows / caches.max_length
        lines.append(f"a token of a sequence takes {format_bytes(kept)} of caches (cache_dtype: {caches.cache_dtype})")
    if choice.plan.trains:
        lines.append(_step_line(choice.best))
    lines.append(_bound_line(choice))
    lines += _runner_up(choice)
    lines += _replica_line(choice)
    useful = [item for item in helps if item.gain > 5e-3]
    if useful:
        lines.append("what would help most:")
        lines += [f"  {item.change}: {item.rows_per_s:.4g} rows/s ({item.gain:+.1%})" for item in useful]
    elif helps:
        lines.append("none of the changes tried (faster links, more memory, one device more) would gain 0.5%")
    return lines


def summary(plan: Plan) -> str:
    """Return a plan in one line.

    Example:
        print(summary(plan))
    """
    prediction = plan.prediction
    stages = " + ".join(counted(len(pipeline.stages), "stage") for pipeline in plan.pipelines)
    on = f"{plan.model}: {stages} on {counted(len(plan.devices), 'device')}"
    what = f"{on}, {counted(plan.microbatch_rows, 'row')} per microbatch"
    if (caches := plan.generation) is not None:
        what = (
            f"{on}, {counted(caches.lanes, 'lane')} of {counted(caches.slots, 'slot')} for {caches.max_length} tokens"
        )
    runtimes = dict.fromkeys(f"{s.runtime} in {s.precision}" for p in plan.pipelines for s in p.stages)
    if list(runtimes) != ["eager in float32"]:
        what += f", {' and '.join(runtimes)}"
    if caches is not None:
        return (
            f"{what}: {prediction.rows_per_s:.4g} tokens/s when all slots are in use, a token of one sequence every "
            f"{format_seconds(prediction.latency_s)} at best"
        )
    if plan.trains:
        counts = " + ".join(map(str, plan.microbatches))
        step_s = plan.batch_rows / prediction.rows_per_s
        return (
            f"{what}, {counts} microbatches a step: {prediction.rows_per_s:.4g} rows/s, a step of {plan.batch_rows} "
            f"rows in {format_seconds(step_s)}"
        )
    sets = max(len(pipeline.cut_sets) for pipeline in plan.pipelines)
    rotation = f", {sets} cut sets in rotation" if sets > 1 else ""
    return (
        f"{what}{rotation}: {prediction.rows_per_s:.4g} rows/s steady, {prediction.num_rows} rows in "
        f"{format_seconds(prediction.total_s)}, latency {format_seconds(prediction.latency_s)}"
    )


def noise_lines(choice: Choice, profile: Profile) -> list[str]:
    """Return a line on differences that the profile does not decide, or none if its measurements were steady."""
    rows, rate = choice.best.rows, choice.best.prediction.rows_per_s
    noise = profile.noise(rows)
    if noise < _STEADY:
        return []
    alike = sum(abs(c.prediction.rows_per_s / rate - 1) <= max(noise, profile.noise(c.rows)) for c in choice.others)
    others = f"; {alike} other plan{'s are' if alike > 1 else ' is'} that near to this one" if alike else ""
    return [
        f"differences below {noise:.1%} are not decided, as the profile's passes of {rows} rows differ by up to "
        f"that{others}; to compare closer, profile again on an idle machine, with more --repeats"
    ]


def load_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """Return each device's load as a bar, its memory and its pipeline's share; the longest bar sets the pace."""
    prediction = plan.prediction
    bottleneck_s = plan.microbatch_rows / prediction.rows_per_s
    longest = max(bottleneck_s, *(load.load_s for load in prediction.devices))
    width = max(len(load.device) for load in prediction.devices)
    shares = {stage.device: pipeline.share for pipeline in plan.pipelines for stage in pipeline.stages}
    lines = []
    for load in prediction.devices:
        part = load.load_s / longest
        bar = "█" * round(part * _BAR)
        have = cluster.device(load.device).memory_bytes
        memory = f"{format_bytes(load.memory_bytes)} of {format_bytes(have)}"
        share = f", {shares[load.device]:.0%} of the rows" if len(plan.pipelines) > 1 else ""
        lines.append(f"  {load.device:<{width}} {bar:<{_BAR}} busy {load.load_s / bottleneck_s:6.1%}, {memory}{share}")
    unused = [device.name for device in cluster.devices if device.name not in plan.devices]
    if unused:
        shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
        lines.append(f"  not used: {shown}")
    return lines


def what_would_help(choice: Choice, profile: Profile, cluster: Cluster, request: PlanRequest) -> list[Help]:
    """Replan with one change at a time: faster links, more memory on a device, one more device.

    Each change is planned for the microbatch sizes of the request. Sorted by gain, largest first.
    """
    rate = choice.plan.prediction.rows_per_s
    found = []
    for change, make in _changes(choice, cluster):
        try:
            plan = choose(profile, make(), replace(request, aim="throughput")).plan
        except PlanError:
            continue
        reached = plan.prediction.rows_per_s
        found.append(Help(change, reached, reached / rate - 1))
    return sorted(found, key=lambda item: -item.gain)


def _changes(choice: Choice, cluster: Cluster) -> list[tuple[str, Callable[[], Cluster]]]:
    devices = cluster.devices
    changes: list[tuple[str, Callable[[], Cluster]]] = []
    if any(device.bandwidth_bytes_per_s for device in devices) or cluster.links:
        changes.append(("links ten times as fast", partial(_with_faster_links, cluster)))
    like = max(devices, key=lambda device: device.speed)
    changes.append((f"one device more like {like.name}", partial(with_one_more, cluster, like)))
    used = {load.device: load.memory_bytes for load in choice.plan.prediction.devices}
    # more memory can help only if the memory is nearly full, or if a device is unused for lack of memory
    full = [d for d in devices if used.get(d.name, d.memory_bytes) >= 0.5 * d.memory_bytes][:_MAX_TRIED_DEVICES]
    for device in full:
        text = f"{format_bytes(2 * device.memory_bytes)} of memory on {device.name} instead of "
        text += format_bytes(device.memory_bytes)
        changes.append((text, partial(_with, cluster, device, memory_bytes=2 * device.memory_bytes)))
    slowest = [d for d in devices if d.bandwidth_bytes_per_s][:_MAX_TRIED_DEVICES]
    if len({d.bandwidth_bytes_per_s for d in slowest}) > 1:
        slow = min(slowest, key=lambda d: d.bandwidth_bytes_per_s or 0.0)
        rate = 10 * (slow.bandwidth_bytes_per_s or 0.0)
        change = partial(_with, cluster, slow, bandwidth_bytes_per_s=rate)
        changes.append((f"a link of {format_rate(rate)} for {slow.name} alone", change))
    return changes


def _with_faster_links(cluster: Cluster) -> Cluster:
    def faster(each: _Linked) -> _Linked:
        rate = each.bandwidth_bytes_per_s
        return msgspec.structs.replace(each, bandwidth_bytes_per_s=rate and rate * 10)

    devices, links = tuple(map(faster, cluster.devices)), tuple(map(faster, cluster.links))
    return msgspec.structs.replace(cluster, devices=devices, links=links)


def _with(cluster: Cluster, device: Device, **changes: float) -> Cluster:
    changed = msgspec.structs.replace(device, **changes)
    return msgspec.structs.replace(cluster, devices=tuple(changed if d == device else d for d in cluster.devices))


def _step_line(candidate: Candidate) -> str:
    """Describe the phases of a training step."""
    problem, total = candidate.problem, candidate.problem.setting.num_microbatches or 1
    divisions = [divisions_of(problem, pipeline)[0] for pipeline in candidate.pipelines]
    step = play_step(problem, divisions, [round(pipeline.share * total) for pipeline in candidate.pipelines])
    idle = [
        1 - sum(span.end_s - span.begin_s for span in spans) / step.computed_s
        for played in step.replicas
        for spans in played.spans
    ]
    return (
        f"a step: {format_seconds(step.computed_s)} until the last backward, in which devices wait for "
        f"{sum(idle) / len(idle):.0%} of the time, {format_seconds(step.all_reduced_s - step.computed_s)} more for "
        f"all-reduces of gradients, {format_seconds(step.step_s - step.all_reduced_s)} for update and loading"
    )


def _bound_line(choice: Choice) -> str:
    prediction = choice.plan.prediction
    gap = prediction.bound_rows_per_s / prediction.rows_per_s - 1
    if choice.best.exact and gap < 1e-6:
        return f"no plan with one cut set and {choice.best.rows} rows per microbatch is faster (exact search)"
    return (
        f"no plan can be faster than {prediction.bound_rows_per_s:.4g} rows/s: "
        f"this one is within {gap:.1%} of that bound"
    )


def _runner_up(choice: Choice) -> list[str]:
    if not choice.others:
        return ["no other plan to compare with"]
    other = choice.others[0]
    cost = 1 - other.prediction.rows_per_s / choice.plan.prediction.rows_per_s
    return [
        f"the runner-up: {_describe(other)}, {other.prediction.rows_per_s:.4g} rows/s ({-cost:+.1%}), "
        f"latency {format_seconds(other.prediction.latency_s)}"
    ]


def _replica_line(choice: Choice) -> list[str]:
    everything = (choice.best, *choice.others)
    kinds = {"stages": ("stages", "rotating cuts"), "replicas": ("replicas",)}
    best = {
        name: max((c for c in everything if c.kind in members), key=lambda c: c.prediction.rows_per_s, default=None)
        for name, members in kinds.items()
    }
    stages, replicas = best["stages"], best["replicas"]
    if stages is None or replicas is None:
        return []
    faster = replicas.prediction.rows_per_s / stages.prediction.rows_per_s - 1
    word = "beat" if faster > 0 else "do not beat"
    return [
        f"replicas {word} stages: {_describe(replicas)} {replicas.prediction.rows_per_s:.4g} rows/s, "
        f"{_describe(stages)} {stages.prediction.rows_per_s:.4g} rows/s ({faster:+.1%})"
    ]


def _describe(candidate: Candidate) -> str:
    stages = " + ".join(counted(len(pipeline.stages), "stage") for pipeline in candidate.pipelines[:4])
    more = f" and {len(candidate.pipelines) - 4} pipelines more" if len(candidate.pipelines) > 4 else ""
    devices, rows = counted(candidate.num_devices, "device"), counted(candidate.rows, "row")
    return f"{candidate.kind}: {stages}{more} on {devices}, {rows} per microbatch"
