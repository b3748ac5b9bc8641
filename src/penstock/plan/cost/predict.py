"""Prediction of a plan's pipelines: throughput, latency, time of a finite stream, and each device's load and memory.

A finite stream includes filling and draining, with bounded buffers. The simulator models the executor, with
microbatches `m`, stages `s` and `depth` buffers on both sides of a cut:

    compute   begins when the stage is free and m has arrived
    done      when it has computed, and one of its buffers is free:   sent[s][m - depth]
    sending   begins when m is done, the link is free, and the next stage has a buffer:  done[s + 1][m - depth]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

import msgspec

from penstock.plan.check import check_cuts, check_devices
from penstock.plan.cost.problem import Division, Placed, Problem, bottleneck_s, latency_s
from penstock.plan.cost.stage_cost import Setting, columns_of
from penstock.plan.cost.training_step import predict_training
from penstock.plan.schedule.round_robin import round_robin
from penstock.plan.schedule.simulate import Channel, Job, Line, play
from penstock.spec.cluster import Cluster
from penstock.spec.plan import DeviceLoad, Plan, PlannedPipeline, Prediction
from penstock.spec.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage: compute for each cut set, and its incoming link.

    `wire_s[cut_set]` is the wire time of a message from the previous stage, `latency_s` its additional latency.
    """

    compute_s: tuple[float, ...]
    wire_s: tuple[float, ...]
    latency_s: float = 0.0


def result_times(
    stages: Sequence[StageTimes],
    rotation: Sequence[int],
    num_microbatches: int,
    *,
    depth: int = 2,
    feed_s: float = 0.0,
    back_s: Sequence[float] = (0.0,),
) -> list[float]:
    """Return the time at which each microbatch's result arrives at the driver, in seconds.

    `rotation` has the cut set of each microbatch, `feed_s` the seconds per microbatch of a driver without a stage,
    `back_s[cut_set]` the seconds of the message back to the driver.

    >>> stage = StageTimes(compute_s=(1.0,), wire_s=(0.0,))
    >>> result_times([stage, stage], (0,), 3)
    [2.0, 3.0, 4.0]
    """
    channels = [
        Channel(wire_s=[stage.wire_s[cut_set] for cut_set in rotation], latency_s=stage.latency_s, at_receiver=depth)
        for stage in stages
    ]
    channels[0].made = [feed_s * (microbatch + 1) for microbatch in range(num_microbatches)]
    lines = []
    for stage, source, target in zip(stages, channels, [*channels[1:], None], strict=True):
        if target is not None:
            target.at_sender = depth
        jobs = [Job(seconds=seconds, source=source, target=target) for seconds in stage.compute_s]
        round_ = [jobs[cut_set] for cut_set in rotation]
        lines.append(Line(list(islice(cycle(round_), num_microbatches))))
    play(lines)
    return [end + back_s[rotation[m % len(rotation)] % len(back_s)] for m, end in enumerate(lines[-1].ends)]


def steady_s(
    stages: Sequence[StageTimes], rotation: Sequence[int], *, depth: int = 2, feed_s: float = 0.0, rounds: int = 4
) -> float:
    """Return the seconds between results of a full pipeline, with cut sets in rotation.

    This includes the time lost because short queues do not absorb all differences between cut sets.
    """
    length = max(len(rotation), 2 * len(stages) + 2)
    times = result_times(stages, rotation, rounds * length, depth=depth, feed_s=feed_s)
    half = rounds // 2 * length
    return (times[-1] - times[half - 1]) / (len(times) - half)


# longer streams only repeat the same pattern
_MAX_MICROBATCHES = 2000


@dataclass(frozen=True, slots=True)
class _Line:
    """A pipeline with numbers instead of names: a division for each cut set."""

    pipeline: PlannedPipeline
    divisions: tuple[Division, ...]

    @property
    def weights(self) -> list[float]:
        return [cut_set.weight for cut_set in self.pipeline.cut_sets]


def problem_of(plan: Plan, profile: Profile, cluster: Cluster) -> Problem:
    """Return the problem that a plan solves; raises `PlanError` if its cuts or devices do not match."""
    check_cuts(plan, profile.cuts)
    check_devices(plan, cluster)
    setting = Setting(
        rows=plan.microbatch_rows,
        depth=plan.depth,
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        optimizer_state_factor=plan.optimizer_state_factor,
    )
    return Problem(profile, cluster, setting, columns_of(plan, profile))


def predict(plan: Plan, profile: Profile, cluster: Cluster, *, num_rows: int | None = None) -> Plan:
    """Return the plan with its prediction on this cluster, for a stream of `num_rows` rows.

    Accepts any plan, including plans written by hand or for another cluster with the same device names.

    Example:
        predict(plan, profile, cluster).prediction.rows_per_s

    Raises `PlanError` if its cuts or devices do not match.
    """
    problem = problem_of(plan, profile, cluster)
    wanted = num_rows or plan.prediction.num_rows
    prediction = predict_pipelines(problem, plan.pipelines, wanted, plan.prediction.bound_rows_per_s)
    return msgspec.structs.replace(plan, prediction=prediction)


def predict_pipelines(
    problem: Problem, pipelines: Sequence[PlannedPipeline], num_rows: int, bound_rows_per_s: float
) -> Prediction:
    """Predict parallel pipelines, each with its share of the microbatches."""
    if problem.setting.trains:
        total = problem.setting.num_microbatches or 1
        counts = [round(pipeline.share * total) for pipeline in pipelines]
        places = [divisions_of(problem, pipeline)[0] for pipeline in pipelines]
        return predict_training(problem, places, counts, num_rows, bound_rows_per_s)
    lines = [_Line(pipeline, divisions_of(problem, pipeline)) for pipeline in pipelines]
    # seconds of the driver's CPU, link out and link in, for an average microbatch of all pipelines
    feeding = [
        sum(line.pipeline.share * seconds for line, seconds in zip(lines, each, strict=True))
        for each in zip(*(problem.feeding_s(line.divisions[0]) for line in lines), strict=True)
    ]
    rows = problem.setting.rows
    # possible bottlenecks: seconds per microbatch of the plan, and a description
    holds: list[tuple[float, str]] = []
    total_s = 0.0
    loads: list[DeviceLoad] = []
    for line in lines:
        times = _stage_times(problem, line, feeding[0])
        order = round_robin(line.weights)
        # seconds per microbatch of a driver without a stage in this pipeline
        elsewhere = not any(stage.device == problem.feeder for stage in line.divisions[0])
        feed_s = max(feeding) / line.pipeline.share if elsewhere else 0.0
        holds.append(
            (
                line.pipeline.share * _line_bottleneck_s(problem, line, len(lines), times, order, feed_s),
                _slowest(problem, line),
            )
        )
        count = max(1, round(num_rows / rows * line.pipeline.share))
        total_s = max(total_s, _stream_s(problem, line, times, order, feed_s, count))
        loads += _loads(problem, line, feeding[0])
    # a stage on the driver takes the driver's CPU seconds, minus those of saved messages
    computes = any(stage.device == problem.feeder for line in lines for stage in line.divisions[0])
    feeding_s = max(feeding[1:] if computes else feeding)
    holds.append((feeding_s, f"feeding on {problem.devices[problem.feeder].name}"))
    slowest_s, limit = max(holds, key=lambda hold: hold[0])
    rate = rows / slowest_s
    return Prediction(
        rows_per_s=rate,
        bound_rows_per_s=max(bound_rows_per_s, rate),
        latency_s=max(latency_s(problem, division) for line in lines for division in line.divisions),
        num_rows=num_rows,
        total_s=max(total_s, feeding_s * num_rows / rows),
        limit=limit,
        devices=tuple(loads),
    )


def divisions_of(problem: Problem, pipeline: PlannedPipeline) -> tuple[Division, ...]:
    """Return a pipeline with numbers instead of names: a division for each cut set."""
    places = {name: index for index, name in enumerate(problem.profile.cuts, 1)}
    devices = [problem.numbers[stage.device] for stage in pipeline.stages]
    bounds = ([0, *(places[name] for name in cut_set.cuts), problem.num_units] for cut_set in pipeline.cut_sets)
    return tuple(
        tuple(Placed(number, start, end) for number, (start, end) in zip(devices, pairwise(own), strict=True))
        for own in bounds
    )


def _stage_times(problem: Problem, line: _Line, feeding_s: float) -> list[StageTimes]:
    found: list[StageTimes] = []
    before = problem.feeder
    for index in range(len(line.pipeline.stages)):
        placed = [division[index] for division in line.divisions]
        number = placed[0].device
        # the driver's work for other devices is spread over the microbatches that it computes itself
        extra = feeding_s / line.pipeline.share if number == problem.feeder else 0.0
        found.append(
            StageTimes(
                compute_s=tuple(problem.own_s(number, p) + extra for p in placed),
                wire_s=tuple(problem.transfer_s(before, number, p.start) for p in placed),
                latency_s=problem.latency_s(before, number),
            )
        )
        before = number
    return found


def _line_bottleneck_s(
    problem: Problem, line: _Line, num_lines: int, times: Sequence[StageTimes], order: Sequence[int], feed_s: float
) -> float:
    """Return the seconds between microbatches of a full pipeline."""
    if num_lines == 1 and len(line.divisions) == 1:
        return bottleneck_s(problem, line.divisions[0])
    steady = steady_s(times, order, depth=problem.setting.depth, feed_s=feed_s)
    # links in both directions, and their share of the driver's link, are included in the paces of single cut sets
    loads = [_link_bottleneck_s(problem, division) for division in line.divisions]
    return max(steady, sum(w * load for w, load in zip(line.weights, loads, strict=True)))


def _link_bottleneck_s(problem: Problem, division: Division) -> float:
    return max(
        float(first[stage.start] + last[stage.end])
        for stage in division
        for first, last in problem.terms(stage.device).pairs()[1:]
    )


def _stream_s(
    problem: Problem, line: _Line, times: Sequence[StageTimes], order: Sequence[int], feed_s: float, count: int
) -> float:
    """Return the seconds of a pipeline for `count` microbatches, including filling and draining."""
    end = line.divisions[0][-1].device
    back = problem.transfer_s(end, problem.feeder, problem.num_units) + problem.latency_s(end, problem.feeder)
    simulated = min(count, _MAX_MICROBATCHES)
    results = result_times(times, order, simulated, depth=problem.setting.depth, feed_s=feed_s, back_s=(back,))
    half = simulated // 2
    rest = (results[-1] - results[half - 1]) / (simulated - half) * (count - simulated) if count > simulated else 0.0
    return results[-1] + rest


def _slowest(problem: Problem, line: _Line) -> str:
    """Name the bottleneck of a pipeline."""
    found: list[tuple[float, str]] = []
    for index in range(len(line.pipeline.stages)):
        placed = [division[index] for division in line.divisions]
        number = placed[0].device
        load = sum(w * problem.load_s(number, p.start, p.end) for w, p in zip(line.weights, placed, strict=True))
        what = problem.limit(number, placed[0].start, placed[0].end)
        found.append((load, f"{what} of {problem.devices[number].name} (stage {index})"))
    for one, other in pairwise(line.divisions[0]):
        seconds = problem.byte_s(one.device, other.device) * float(problem.costs.crossing[one.end])
        names = " and ".join(problem.devices[stage.device].name for stage in (one, other))
        found.append((seconds, f"the link between {names}"))
    if not any(stage.device == problem.feeder for stage in line.divisions[0]):
        found.append((problem.feeding_only_s(), f"feeding on {problem.devices[problem.feeder].name}"))
    return max(found, key=lambda item: item[0])[1]


def _loads(problem: Problem, line: _Line, feeding_s: float) -> list[DeviceLoad]:
    loads: list[DeviceLoad] = []
    counts = problem.in_flight(line.divisions[0])
    for index, in_flight in enumerate(counts):
        placed = [division[index] for division in line.divisions]
        number = placed[0].device
        own = sum(w * problem.own_s(number, p) for w, p in zip(line.weights, placed, strict=True))
        load_s = own * line.pipeline.share + (feeding_s if number == problem.feeder else 0.0)
        need = union_bytes(problem, number, placed, in_flight)
        loads.append(DeviceLoad(device=problem.devices[number].name, load_s=load_s, memory_bytes=need))
    return loads


def union_bytes(problem: Problem, number: int, placed: Sequence[Placed], in_flight: int) -> float:
    """Return the memory of a device that holds the units of a stage for several cut sets."""
    start, end = min(p.start for p in placed), max(p.end for p in placed)
    costs, (first, last) = problem.costs, problem.terms(number).memory
    kept = float(costs.kept_at_end_bytes[end] - costs.kept_bytes[start]) * in_flight
    ends = max(float(first[p.start] + last[p.end]) for p in placed)
    # buffers have the size of the largest message of any cut set
    ends = max(ends, max(float(first[p.start]) for p in placed) + max(float(last[p.end]) for p in placed))
    return float(costs.held_bytes[start, end]) + kept + ends
