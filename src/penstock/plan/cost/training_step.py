"""Costs of a training step, from a simulation of its schedule: seconds, and each device's load and memory.

The sums of gradients over the devices that hold the same weights follow the engine's algorithm, on the cost model:
gradients of weights held by the same devices travel in buckets around a ring of these devices. Each device processes
its buckets in the order in which backwards finish, and a bucket starts when the last of its devices has the gradients.
Small buckets are sent directly to all:

    device 0   |F0|F1|B0|   B1   |            the last backward makes gradients final bit by bit
    device 2   |F0|F1|B0| B1 |                (units of the model's end first)
                         ──bucket 0──▶──bucket 1──▶

For a bucket of `B` bytes, each of `K` devices sends and receives 2 (K - 1) / K * B bytes in 2 (K - 1) successive
messages (Patarasuk and Yuan 2009); if sent directly, (K - 1) B bytes in one step. Wire time overlaps the last
backwards; the CPU time of messages and bytes does not, since the device is computing backwards.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from penstock.plan.cost.problem import Division, Placed, Problem, latency_s
from penstock.plan.schedule.schedules import BACKWARD_PARTS, Action, make_schedule
from penstock.plan.schedule.simulate import Crossing, Simulation, simulate
from penstock.spec.plan import DeviceLoad, Prediction
from penstock.wire import adds_up_at_once, bucket_limit


@dataclass(slots=True)
class PlannedBucket:
    """Gradients that are reduced together, their devices, and for each device the first unit that uses one of them."""

    devices: tuple[int, ...]
    num_bytes: float = 0.0
    first_units: dict[int, int] = field(default_factory=dict)

    @property
    def at_once(self) -> bool:
        """True if each device sends the whole bucket to all others instead of parts around a ring."""
        return adds_up_at_once(len(self.devices), self.num_bytes)

    def cpu_s(self, problem: Problem, device: int) -> float:
        """Return the CPU seconds that the bucket takes on a device, before and while it travels."""
        profile, count = problem.profile, len(self.devices)
        around = count - 1 if self.at_once else 2 * (count - 1) / count
        per_byte = around * (profile.send_s_per_byte + profile.receive_s_per_byte) + profile.sum_s_per_byte
        num_messages = (count - 1) * (1 if self.at_once else 2)
        return self.num_bytes * per_byte / problem.devices[device].speed + _messages_s(problem, device, num_messages)

    def seconds(self, problem: Problem) -> float:
        """Return the seconds of a bucket from its start until every device has all sums."""
        count, cpu_s = len(self.devices), max(self.cpu_s(problem, device) for device in self.devices)
        if self.at_once:
            wire_s = max(
                (count - 1) * self.num_bytes * problem.wire_s(one, other) + problem.latency_s(one, other)
                for one, other in combinations(self.devices, 2)
            )
            return wire_s + cpu_s
        neighbours = zip(self.devices, (*self.devices[1:], self.devices[0]), strict=True)
        each = max(
            self.num_bytes / count * problem.wire_s(one, other) + problem.latency_s(one, other)
            for one, other in neighbours
        )
        return 2 * (count - 1) * each + cpu_s


def _messages_s(problem: Problem, device: int, count: int) -> float:
    """Return the CPU seconds of n sent and n received messages, excluding costs per byte."""
    return count * (problem.profile.feed_s + problem.profile.result_s) / problem.devices[device].speed


@dataclass(frozen=True, slots=True)
class LastBackward:
    """The last backward of a stage: when its first gradients become final, and when it ends."""

    stage: Placed
    begin_s: float
    end_s: float

    def final_s(self, problem: Problem, unit: int) -> float:
        """Return when the gradients of a unit's weights are final."""
        backward = problem.costs.backward_s
        whole = float(backward[self.stage.end] - backward[self.stage.start])
        done = float(backward[self.stage.end] - backward[unit])
        return self.begin_s + (self.end_s - self.begin_s) * (done / whole if whole else 1.0)


def make_buckets(problem: Problem, divisions: Sequence[Division]) -> list[PlannedBucket]:
    """Return the buckets of parallel pipelines, in each device's processing order.

    This includes a single pipeline: a weight that two of its stages use is summed over both.

    Example:
        make_buckets(problem, [division])       # none if no stages share a weight
    """
    bounds = sorted({stage.start for division in divisions for stage in division})
    found: list[tuple[object, float, dict[int, int]]] = []
    totals: dict[object, float] = defaultdict(float)
    for num_bytes, units in reversed(problem.costs.tensors.values()):
        first_units = _first_units(divisions, units)
        if len(first_units) > 1:
            # pipelines with different cuts hold different parts of the model; weights on different devices never share
            # a bucket
            alike = tuple(first_units), tuple(sorted({bisect_right(bounds, unit) for unit in units}))
            found.append((alike, num_bytes, first_units))
            totals[alike] += num_bytes
    filling: dict[object, PlannedBucket] = {}
    buckets: list[PlannedBucket] = []
    for group, weight_bytes, first in found:
        bucket = filling.get(group)
        if bucket is None or bucket.num_bytes + weight_bytes > bucket_limit(totals[group]):
            bucket = filling[group] = PlannedBucket(tuple(first))
            buckets.append(bucket)
        bucket.num_bytes += weight_bytes
        for device, unit in first.items():
            bucket.first_units[device] = min(unit, bucket.first_units.get(device, unit))
    return buckets


def _first_units(divisions: Sequence[Division], units: Sequence[int]) -> dict[int, int]:
    """Return the devices that hold a weight, in order, with the first unit that uses it on each."""
    found: dict[int, int] = {}
    for division in divisions:
        starts = [stage.start for stage in division]
        for unit in units:
            found.setdefault(division[bisect_right(starts, unit) - 1].device, unit)
    return found


def all_reduced_s(
    problem: Problem, buckets: Sequence[PlannedBucket], last: Mapping[int, Sequence[LastBackward]]
) -> float:
    """Return the time at which every device has computed the last backwards of its stages and has all sums.

    Example:
        all_reduced_s(problem, make_buckets(problem, divisions), last)
    """
    free = dict.fromkeys(last, 0.0)
    cpu_s = dict.fromkeys(last, 0.0)
    for bucket in buckets:
        ready = max(
            max(free[device], _stage_of(unit, last[device]).final_s(problem, unit))
            for device, unit in bucket.first_units.items()
        )
        done = ready + bucket.seconds(problem)
        for device in bucket.devices:
            free[device] = done
            cpu_s[device] += bucket.cpu_s(problem, device)
    ends = {device: max(backward.end_s for backward in backwards) for device, backwards in last.items()}
    return max(max(free[device], end_s + cpu_s[device]) for device, end_s in ends.items())


def _stage_of(unit: int, backwards: Sequence[LastBackward]) -> LastBackward:
    return next(backward for backward in backwards if backward.stage.start <= unit < backward.stage.end)


# bytes per byte of weights that the optimizer's step uses in addition to weights and gradients: AdamW's two moments
ADAMW_STATE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step of parallel pipelines; times are in seconds since its first forward.

    - `buckets`: gradients that are sent together;
    - `computed_s`: when the last backward of all pipelines is done;
    - `all_reduced_s`: when every device has its summed gradients;
    - `step_s`: after the optimizer's update and the loading of the next rows.
    """

    replicas: tuple[Simulation, ...]
    buckets: tuple[PlannedBucket, ...]
    computed_s: float
    all_reduced_s: float
    step_s: float


def simulate_step(problem: Problem, division: Division, num_microbatches: int | None = None) -> Simulation:
    """Simulate one pipeline's part of a step: all microbatches forward and backward, including filling and draining.

    Each stage is on one device, which may hold several stages. A stage's work on a microbatch, including messages, is
    divided between forward and backward like its units' seconds; the halves of a split backward are assumed equal, and
    messages take equally long in both directions.

    Example:
        simulate_step(problem, division).makespan_s
    """
    setting, costs = problem.setting, problem.costs
    holders = [stage.device for stage in division]
    devices = devices_of(division)
    own_s = [problem.own_s(number, stage) for number, stage in zip(holders, division, strict=True)]
    forward = [
        float(costs.forward_s[stage.end] - costs.forward_s[stage.start])
        / (float(costs.seconds[stage.end] - costs.seconds[stage.start]) or 1.0)
        for stage in division
    ]

    def duration(action: Action, _device: int) -> float:
        part = forward[action.stage]
        return own_s[action.stage] * (part if action.kind == "F" else (1 - part) * BACKWARD_PARTS[action.kind])

    # with interleaved stages, there are several cuts between two devices, of about the same size
    cuts: dict[frozenset[int], list[int]] = defaultdict(list)
    for before, after in pairwise(division):
        cuts[frozenset((before.device, after.device))].append(after.start)

    def transfer(source: int, to: int, _kind: Crossing) -> float:
        one, other = devices[source], devices[to]
        between = cuts[frozenset((one, other))]
        seconds = sum(problem.transfer_s(one, other, cut) for cut in between) / len(between)
        return seconds + problem.latency_s(one, other)

    count = num_microbatches or setting.num_microbatches or 1
    return simulate(make_schedule(setting.schedule, len(division), count, len(devices)), duration, transfer)


def devices_of(division: Division) -> list[int]:
    """Return the devices of a training pipeline, without duplicates, in the order of its schedule."""
    return list(dict.fromkeys(stage.device for stage in division))


def play_step(problem: Problem, divisions: Sequence[Division], counts: Sequence[int]) -> SimulatedStep:
    """Simulate a step of parallel pipelines, each with its number of microbatches, including the end of the step.

    Gradients are summed over the devices that hold the same weights (`all_reduced_s`). Then every device reports
    completion to all others, updates its weights and, if it has the first or last stage, loads the rows of the next
    step.

    Example:
        play_step(problem, [division], [8]).step_s
    """
    replicas = tuple(simulate_step(problem, d, count) for d, count in zip(divisions, counts, strict=True))
    last: dict[int, list[LastBackward]] = defaultdict(list)
    after_s: dict[int, float] = defaultdict(float)
    for division, count, played in zip(divisions, counts, replicas, strict=True):
        # the last action of a stage is for its last microbatch
        spans = {span.action.stage: span for own in played.spans for span in own if span.action.kind != "F"}
        for index, stage in enumerate(division):
            device, span = stage.device, spans[index]
            # with a split backward, gradients of weights are final only when all are computed
            begin_s = span.begin_s if span.action.kind == "B" else span.end_s
            last[device].append(LastBackward(stage, begin_s, span.end_s))
            rows = problem.setting.rows * count if index in {0, len(division) - 1} else 0
            load_s = rows * problem.profile.loader_s_per_row / problem.devices[device].speed
            after_s[device] += _update_s(problem, device, stage.start, stage.end) + load_s
    buckets = make_buckets(problem, divisions)
    done_s = all_reduced_s(problem, buckets, last)
    # every process reports the outcome of its part to all other processes
    told_s = max((problem.latency_s(one, other) for one, other in combinations(last, 2)), default=0.0)
    told_s += max(_messages_s(problem, device, len(last) - 1) for device in last)
    return SimulatedStep(
        replicas=replicas,
        buckets=tuple(buckets),
        computed_s=max(played.makespan_s for played in replicas),
        all_reduced_s=done_s,
        step_s=done_s + told_s + max(after_s.values()),
    )


def _update_s(problem: Problem, device: int, start: int, end: int) -> float:
    """Return the seconds of the optimizer's step: measured for AdamW, and scaled by state size for other optimizers."""
    part = (1 + problem.setting.optimizer_state_factor) / (1 + ADAMW_STATE)
    num_bytes = float(problem.costs.parameter_bytes[start, end])
    return num_bytes * problem.profile.update_s_per_byte * part / problem.devices[device].speed


def predict_training(
    problem: Problem, divisions: Sequence[Division], counts: Sequence[int], num_rows: int, bound_rows_per_s: float
) -> Prediction:
    """Predict parallel training pipelines, each with its number of a step's microbatches.

    Example:
        predict_training(problem, [division], [8], num_rows=512, bound_rows_per_s=math.inf).rows_per_s
    """
    step = play_step(problem, divisions, counts)
    batch = problem.setting.rows * sum(counts)
    rate = batch / step.step_s
    loads = _loads(problem, divisions, counts, step.buckets)
    return Prediction(
        rows_per_s=rate,
        bound_rows_per_s=max(bound_rows_per_s, rate),
        latency_s=max(latency_s(problem, division) for division in divisions),
        num_rows=num_rows,
        total_s=-(-num_rows // batch) * step.step_s,
        limit=_limit(problem, divisions, loads, step),
        devices=tuple(loads),
    )


def memory_in_training(problem: Problem, division: Division) -> dict[int, float]:
    """Return the memory that each device of a pipeline needs, with any schedule."""
    if len(devices_of(division)) < len(division):
        return interleaved_memory(problem, division)
    return {
        stage.device: problem.memory_bytes(stage.device, stage.start, stage.end, in_flight)
        for stage, in_flight in zip(division, problem.in_flight(division), strict=True)
    }


def _loads(
    problem: Problem, divisions: Sequence[Division], counts: Sequence[int], buckets: Sequence[PlannedBucket]
) -> list[DeviceLoad]:
    """Return each device's average CPU seconds per microbatch of the plan, including all-reduces."""
    total = sum(counts)
    loads = []
    for division, count in zip(divisions, counts, strict=True):
        own = problem.for_replica(count) if len(divisions) > 1 else problem
        for device, memory_bytes in memory_in_training(own, division).items():
            all_reduce_s = sum(bucket.cpu_s(problem, device) for bucket in buckets if device in bucket.devices)
            own_s = sum(problem.own_s(device, stage) for stage in division if stage.device == device)
            loads.append(
                DeviceLoad(
                    device=problem.devices[device].name,
                    load_s=(own_s * count + all_reduce_s) / total,
                    memory_bytes=memory_bytes,
                )
            )
    return loads


def _limit(problem: Problem, divisions: Sequence[Division], loads: Sequence[DeviceLoad], step: SimulatedStep) -> str:
    """Name the bottleneck of a step: the busiest device, or all-reduces that do not overlap with backwards."""
    busiest = max(loads, key=lambda load: load.load_s)
    if step.all_reduced_s - step.computed_s > step.computed_s:
        return "the all-reduces of gradients"
    stages = (enumerate(division) for division in divisions)
    places = {problem.devices[stage.device].name: index for each in stages for index, stage in each}
    return f"compute of {busiest.device} (stage {places[busiest.device]})"


def interleaved_memory(problem: Problem, division: Division) -> dict[int, float]:
    """Return the memory of each device that holds several stages.

    One process holds all of them and works on one at a time; kept bytes are counted along the schedule.
    """
    costs, setting = problem.costs, problem.setting
    devices = devices_of(division)
    schedule = make_schedule(setting.schedule, len(division), setting.num_microbatches or 1, len(devices))
    needs = {}
    for device, actions in zip(devices, schedule, strict=True):
        first, last = problem.terms(device).memory
        own = [stage for stage in division if stage.device == device]
        process = float(first[-1] - costs.messages_bytes()[-1])
        messages = sum(float(first[stage.start] + last[stage.end]) - process for stage in own)
        working = [float(costs.working_bytes[stage.start, stage.end]) for stage in own]
        held = sum(float(costs.held_bytes[stage.start, stage.end]) for stage in own) - sum(working) + max(working)
        needs[device] = process + messages + held + _kept_bytes(problem, division, actions)
    return needs


def _kept_bytes(problem: Problem, division: Division, actions: tuple[Action, ...]) -> float:
    """Return the peak bytes that a device keeps for backwards."""
    costs = problem.costs
    kept = most = 0.0
    for action in actions:
        stage = division[action.stage]
        change = float(costs.kept_at_end_bytes[stage.end] - costs.kept_bytes[stage.start])
        kept += change if action.kind == "F" else -change if action.kind in {"B", "W"} else 0.0
        most = max(most, kept)
    return most
