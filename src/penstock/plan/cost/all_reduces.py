"""Cost of all-reducing gradients over the devices that hold the same weights.

The engine's algorithm, on the cost model: gradients of weights held by the same devices travel in buckets around a ring
of these devices. Each device processes its buckets in the order in which backwards finish, and a bucket starts when the
last of its devices has the gradients. Small buckets are sent directly to all:

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
from itertools import combinations

from penstock.plan.cost.problem import Division, Placed, Problem
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
        return self.num_bytes * per_byte / problem.devices[device].speed + messages_s(problem, device, num_messages)

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


def messages_s(problem: Problem, device: int, count: int) -> float:
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
