"""Costs of every stage on every device, from a profile, a cluster and a setting; costs of pipelines of these stages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from penstock.plan.cost.stage_cost import Columns, Costs, Pair, Setting, Vector, factor_at
from penstock.spec.cluster import Cluster, Device
from penstock.spec.profile import Profile


@dataclass(frozen=True, slots=True)
class Placed:
    """A placed stage: the number of its device, and its first and last boundary."""

    device: int
    start: int
    end: int


# minimum load of a stage
LEAST_S = 1e-300
# the stages of one pipeline, in order
Division = tuple[Placed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Costs of a device, as terms of the first and the last boundary.

    Its own work on CPU, link out and link in; the additions of driving to each; and memory in addition to the stage's.
    """

    own: tuple[Pair, ...]
    feeding: tuple[Pair, ...]
    memory: Pair

    def pairs(self) -> tuple[Pair, ...]:
        """Return the sums of own work and driving."""
        return tuple((a + c, b + d) for (a, b), (c, d) in zip(self.own, self.feeding, strict=True))


class Problem:
    """A profile, a cluster and a setting, with costs by device number.

    `columns` are the runtimes of devices that do not use eager. `speeds` are the speeds of units on each device's
    runtime; messages and other work of a stage run at the device's own speed.

    Example:
        problem = Problem(profile, cluster, Setting(rows=1))
        problem.load_s(0, 3, 7), problem.memory_bytes(0, 3, 7, in_flight=0)
    """

    def __init__(self, profile: Profile, cluster: Cluster, setting: Setting, columns: Columns | None = None) -> None:
        self.profile = profile
        self.columns: Columns = columns or {}
        self.cluster = cluster
        self.setting = setting
        self.costs = Costs(profile, setting)
        self.devices = cluster.devices
        self.speeds = np.array(
            [device.speed / factor_at(profile, self.columns.get(device.name), setting.rows) for device in self.devices]
        )
        self.num_units = self.costs.num_units
        self.numbers = {device.name: number for number, device in enumerate(self.devices)}
        self.feeder = self.numbers[cluster.feeding.name]
        self._replicas: dict[int, Problem] = {}
        self._pairs = {frozenset(link.between): link for link in cluster.links}
        self.terms = lru_cache(maxsize=64)(self._terms)
        self.cost_matrix = lru_cache(maxsize=32 if self.num_units <= 500 else 2)(self._cost_matrix)

    def for_replica(self, num_microbatches: int) -> "Problem":
        """Return the same problem for one of several training pipelines, with its part of a step's microbatches."""
        if num_microbatches not in self._replicas:
            setting = replace(self.setting, num_microbatches=num_microbatches, replicated=True)
            self._replicas[num_microbatches] = Problem(self.profile, self.cluster, setting, self.columns)
        return self._replicas[num_microbatches]

    def for_stages(self, num_stages: int) -> "Problem":
        """Return the same problem for pipelines of `num_stages` stages, on which the memory of stages may depend."""
        return Problem(self.profile, self.cluster, replace(self.setting, num_stages=num_stages), self.columns)

    def in_flight(self, division: Division) -> list[int]:
        """Return the number of microbatches that each stage keeps for their backward."""
        setting = replace(self.setting, num_stages=len(division))
        return [setting.in_flight(len(division) - index) for index in range(len(division))]

    def byte_s(self, first: int, second: int) -> float:
        """Return the seconds per byte of the link between only these two devices; 0 without a separate link."""
        link = self._pairs.get(frozenset((self.devices[first].name, self.devices[second].name)))
        return 1 / link.bandwidth_bytes_per_s if link and link.bandwidth_bytes_per_s else 0.0

    def latency_s(self, first: int, second: int) -> float:
        """Return the latency of a message between two devices in seconds."""
        if first == second:
            return 0.0
        one, other = self.devices[first], self.devices[second]
        link = self._pairs.get(frozenset((one.name, other.name)))
        return link.latency_s if link else max(one.latency_s, other.latency_s)

    def transfer_s(self, first: int, second: int, boundary: int) -> float:
        """Return the wire time in seconds of a message across a boundary between two devices."""
        return float(self.costs.crossing[boundary]) * self.wire_s(first, second)

    def wire_s(self, first: int, second: int) -> float:
        """Return the seconds per byte from one device to another, limited by the slowest link in between."""
        if first == second:
            return 0.0
        rates = [self.devices[n].bandwidth_bytes_per_s for n in (first, second)]
        return max([self.byte_s(first, second), *(1 / rate for rate in rates if rate)])

    def load_s(self, device: int, start: int, end: int) -> float:
        """Return the seconds per microbatch of a device's busiest resource, including driving."""
        return max(float(a[start] + b[end]) for a, b in self.terms(device).pairs())

    def limit(self, device: int, start: int, end: int) -> str:
        """Name the resource of a device that is busiest with a stage."""
        loads = [float(a[start] + b[end]) for a, b in self.terms(device).pairs()]
        names = ["compute", "link out", "link in", "link to the feeder", "link to the feeder"]
        return names[loads.index(max(loads))]

    def memory_bytes(self, device: int, start: int, end: int, in_flight: int) -> float:
        """Return the total memory that a device needs for a stage."""
        costs, extra = self.costs, self.terms(device).memory
        kept = float(costs.kept_at_end_bytes[end] - costs.kept_bytes[start]) * in_flight
        return float(costs.held_bytes[start, end]) + kept + float(extra[0][start] + extra[1][end])

    def fits(self, device: int, start: int, end: int, in_flight: int) -> bool:
        """Return True if a device has the memory for a stage."""
        return self.memory_bytes(device, start, end, in_flight) <= self.devices[device].memory_bytes

    def feeding_only_s(self) -> float:
        """Return the driver's seconds per microbatch if it holds no stage."""
        pairs = self.terms(self.feeder).feeding
        # neither end of the pipeline is on the driver: all messages cross its link
        return max(float(a[-1] + b[0]) for a, b in pairs)

    def feeding_s(self, division: Division) -> list[float]:
        """Return the driver's seconds per microbatch of a pipeline: CPU, link out and link in.

        Messages at ends of the pipeline that are on the driver cross no link.
        """
        own = next((stage for stage in division if stage.device == self.feeder), None)
        start, end = (own.start, own.end) if own is not None else (-1, 0)
        return [float(a[start] + b[end]) for a, b in self.terms(self.feeder).feeding[:3]]

    def path_terms(self, device: int) -> Pair:
        """Return the seconds that a microbatch spends in a stage, as terms of its two boundaries."""
        return self.terms(device).own[0]

    def own_s(self, number: int, stage: Placed) -> float:
        """Return the CPU seconds of a stage on one device, without driving."""
        first, last = self.path_terms(number)
        return float(first[stage.start] + last[stage.end])

    def own_load_s(self, number: int, stage: Placed) -> float:
        """Return the seconds of a device's busiest resource for a stage, without driving.

        The result is above 0, so that the rate is finite: if a driver's stage costs less than the messages that it
        saves, all of its load is driving.
        """
        return max(LEAST_S, *(float(first[stage.start] + last[stage.end]) for first, last in self.terms(number).own))

    def _terms(self, number: int) -> Terms:
        costs, device = self.costs, self.devices[number]
        feeds = number == self.feeder and not self.setting.trains
        before, after = costs.before_s.copy(), costs.after_s.copy()
        incoming, outgoing = costs.crossing.copy(), costs.crossing.copy()
        if feeds:  # the driver's own data does not cross a link
            before[0], after[-1] = -costs.own_input_s, -costs.own_output_s
            incoming[0] = outgoing[-1] = 0.0
        per_byte = 1 / device.bandwidth_bytes_per_s if device.bandwidth_bytes_per_s else 0.0
        units_s = costs.seconds / self.speeds[number]
        own = [
            (before / device.speed - units_s, units_s + (costs.overhead_s + after) / device.speed),
            (costs.returning * per_byte, outgoing * per_byte),
            (incoming * per_byte, costs.returning * per_byte),
        ]
        feeding = self._feeding(device, per_byte) if feeds else [_zeros(costs)] * 3
        if self._pairs and not feeds:
            first, last = _zeros(costs)
            first[0] = costs.crossing[0] * self.byte_s(self.feeder, number)
            last[-1] = costs.crossing[-1] * self.byte_s(number, self.feeder)
            own += [(first, np.zeros_like(first)), (np.zeros_like(last), last)]
            feeding += [_zeros(costs)] * 2
        return Terms(own=tuple(own), feeding=tuple(feeding), memory=self._memory_terms(feeds))

    def _feeding(self, device: Device, per_byte: float) -> list[Pair]:
        costs, profile = self.costs, self.profile
        elsewhere_first, elsewhere_last = np.ones(self.num_units + 1), np.ones(self.num_units + 1)
        elsewhere_first[0] = elsewhere_last[-1] = 0.0
        fed, taken = float(costs.crossing[0]) * elsewhere_first, float(costs.crossing[-1]) * elsewhere_last
        return [
            (
                (costs.feeding_s + fed * profile.send_s_per_byte) / device.speed,
                taken * profile.receive_s_per_byte / device.speed,
            ),
            (fed * per_byte, np.zeros_like(fed)),
            (np.zeros_like(taken), taken * per_byte),
        ]

    def _memory_terms(self, feeds: bool) -> Pair:
        messages = self.costs.messages_bytes()
        # in training every process runs the script, which loads the model's library and graph
        script_bytes = self.profile.script_bytes if feeds or self.setting.trains else 0.0
        first, last = messages + self.profile.base_bytes + self.setting.recording_bytes + script_bytes, messages.copy()
        if feeds:  # if the first or last stage is on another device, the driver has an end of those messages
            first[1:] += messages[0]
            last[:-1] += messages[-1]
        return first, last

    def _cost_matrix(self, device: int, in_flight: int) -> Vector:
        return self.cost_block(device, in_flight, slice(0, None), slice(0, None))

    def cost_block(self, device: int, in_flight: int, starts: slice, ends: slice) -> Vector:
        """Return the seconds of stages for all start and end boundaries; infinite if empty or out of memory."""
        (first, last), *more = self.terms(device).pairs()
        block: Vector = first[starts, None] + last[None, ends]
        for first, last in more:
            np.maximum(block, first[starts, None] + last[None, ends], out=block)
        block[self.memory_block(device, in_flight, starts, ends) > self.devices[device].memory_bytes] = np.inf
        numbers = np.arange(self.num_units + 1)
        block[numbers[starts, None] >= numbers[None, ends]] = np.inf
        return block

    def memory_block(self, device: int, in_flight: int, starts: slice, ends: slice) -> Vector:
        """Return the memory of stages for all start and end boundaries."""
        costs, (first, last) = self.costs, self.terms(device).memory
        need: Vector = costs.held_bytes[starts, ends] + (first[starts, None] + last[None, ends])
        if in_flight:
            need += in_flight * (costs.kept_at_end_bytes[None, ends] - costs.kept_bytes[starts, None])
        return need

    def signature(self, number: int) -> tuple[object, ...]:
        """Return a key that two devices have in common exactly if they are interchangeable."""
        device = self.devices[number]
        mine = [
            (link, next(n for n in link.between if n != device.name))
            for link in self.cluster.links
            if device.name in link.between
        ]
        links = tuple((other, link.bandwidth_bytes_per_s, link.latency_s) for link, other in mine)
        speed, rate = device.speed, device.bandwidth_bytes_per_s
        feeds = number == self.feeder and not self.setting.trains
        return speed, float(self.speeds[number]), device.memory_bytes, rate, device.latency_s, feeds, links


def _zeros(costs: Costs) -> Pair:
    return np.zeros(costs.num_units + 1), np.zeros(costs.num_units + 1)


def bottleneck_s(problem: Problem, division: Division) -> float:
    """Return the seconds between microbatches of a full pipeline, set by its busiest device or link."""
    pace = max(problem.load_s(stage.device, stage.start, stage.end) for stage in division)
    for one, other in pairwise(division):
        between = problem.byte_s(one.device, other.device)
        pace = max(pace, float(problem.costs.crossing[one.end]) * between)
    if not any(stage.device == problem.feeder for stage in division):
        pace = max(pace, problem.feeding_only_s())
    return pace


def latency_s(problem: Problem, division: Division) -> float:
    """Return the seconds from sending a microbatch into an empty pipeline until its result arrives."""
    costs, feeder = problem.costs, problem.feeder
    total = costs.feeding_s / problem.devices[feeder].speed
    places = [feeder, *(stage.device for stage in division), feeder]
    bounds = [*(stage.start for stage in division), problem.num_units]
    for (one, other), boundary in zip(pairwise(places), bounds, strict=True):
        total += problem.transfer_s(one, other, boundary) + problem.latency_s(one, other)
    total += sum(problem.own_s(stage.device, stage) for stage in division)
    return total


def fits_all(problem: Problem, division: Division) -> bool:
    """Return True if every device of a pipeline has the memory for its stage."""
    return all(
        problem.fits(stage.device, stage.start, stage.end, in_flight)
        for stage, in_flight in zip(division, problem.in_flight(division), strict=True)
    )


_PRECISION = 1e-5
# quantiles above which units are counted as heavy
_HEAVY = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


def bottleneck_bound_s(problem: Problem, *, share: bool = False, numbers: Sequence[int] | None = None) -> float:
    """Return a lower bound on the seconds between microbatches of any plan on these devices.

    Each device can at most run the stage with the most work that it can do within that time, anywhere in the model;
    together the devices must run the whole model. Memory and links are ignored. With `share`, devices may share
    microbatches; then devices can be filled completely, and only the total work counts. `numbers` are the usable
    devices, by default all.

    Example:
        gap = bottleneck_s / bottleneck_bound_s(problem) - 1
    """
    costs = problem.costs
    chosen = list(range(len(problem.devices))) if numbers is None else list(numbers)
    speeds = problem.speeds[chosen]
    feeding = costs.feeding_s * (np.array(chosen) == problem.feeder)
    # a driver that holds both ends may save more than the overhead of its stage
    ends = costs.overhead_s - costs.own_input_s - costs.own_output_s
    feeder_s = (costs.feeding_s + min(0.0, ends)) / problem.devices[problem.feeder].speed
    work = costs.total_s + (ends if share else min(0.0, ends))
    # if devices can be filled completely, only the total work counts
    enough: Callable[[Vector], bool] = (
        (lambda budgets: float(budgets.sum()) >= work * (1 - 1e-12)) if share else _Stages(problem).enough
    )
    low = max(feeder_s, work / float(speeds.sum()))
    if enough(np.maximum(speeds * low - feeding, 0.0)):
        return low
    high = max(low, (2 * work + costs.overhead_s + costs.feeding_s) / float(speeds.min()))
    high += float(costs.before_s.max() + costs.after_s.max()) / float(speeds.min())
    while high > max(low * (1 + _PRECISION), 1e-300):
        # the bound is usually near the lower end, so bisect the ratio
        middle = math.sqrt(low * high) if low else high / 2
        if enough(np.maximum(speeds * middle - feeding, 0.0)):
            high = middle
        else:
            low = middle
    return low


class _Stages:
    """A test whether devices could run the whole model, if each ran the stage with the most work that it can do.

    It compares the work in seconds, and the numbers of units above several weights: few devices may be fast enough for
    a heavy unit, and these have time for only a few units.
    """

    def __init__(self, problem: Problem) -> None:
        costs = problem.costs
        # messages at the model's ends may not leave the driver
        before, after = costs.before_s.copy(), costs.after_s.copy()
        before[0], after[-1] = -costs.own_input_s, -costs.own_output_s
        self.starts = costs.seconds - before - costs.overhead_s
        ends = costs.seconds + after
        # to find the last boundary within a limit: costs of ends are not monotonic, but their minimum from a boundary
        # on is
        self.least = np.minimum.accumulate(ends[::-1])[::-1]
        units = np.diff(costs.seconds)
        heavy = [np.where(units >= limit, 1.0, 0.0) for limit in np.quantile(units, _HEAVY)]
        self.measures = np.array([np.concatenate([[0.0], np.cumsum(m)]) for m in (units, *heavy)])

    def enough(self, budgets: Vector) -> bool:
        """Return True if devices with these seconds of work per microbatch may be able to run the whole model."""
        total = np.zeros(len(self.measures))
        for budget, count in zip(*np.unique(budgets, return_counts=True), strict=True):
            last = np.searchsorted(self.least, (self.starts + budget) * (1 + 1e-12), side="right") - 1
            most = (self.measures[:, np.maximum(last, 0)] - self.measures).max(axis=1)
            total += np.maximum(most, 0.0) * int(count)
        return bool((total >= self.measures[:, -1] * (1 - 1e-12)).all())
