"""The account: the difference between n times and the measured speed-up, split by cause.

Each line is the difference between two replays of the same run, the second with one more cost; so the lines add up
exactly. `docs/account.md` has the definition.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from penstock.plan.schedule.simulate import Edge
from penstock.report.stream_measured import (
    Backlog,
    MeasuredStage,
    MeasuredStream,
    Recorded,
    backlog_in_waits,
    measure_stream,
    other_threads_cpu_s,
    replay,
    share,
)
from penstock.tracing.record import FEEDER_STAGE
from penstock.tracing.trace import MachineCapacity, Run
from penstock.units import format_bytes, format_seconds

TITLES = {
    "imbalance": "imbalance",
    "update": "optimizer's update",
    "bubble": "fill and drain",
    "slower": "slower compute than alone",
    "communication_cpu": "CPU spent on communication",
    "overhead": "runtime overhead",
    "loading": "loading data",
    "communication": "communication not hidden",
    "between": "code between steps",
    "synchronization": "synchronization",
    "remainder": "not explained",
}
_ALIKE = 0.25
# replays of a stream: each includes one more cost
_ORDER = ("bubble", "slower", "communication_cpu", "overhead", "loading", "communication")
_COUNTED = {
    "bubble": {"alone"},
    "slower": {"slower"},
    "communication_cpu": {"bytes"},
    "overhead": {"fixed"},
    "loading": {"load"},
    "communication": set(),
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause: its cost in multiples of one device, and a sentence with the figures."""

    key: str
    times: float
    why: str

    @property
    def title(self) -> str:
        """Title of the cause."""
        return TITLES[self.key]


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a run: `num_times` minus the sum of the lines is exactly `speedup`.

    `baseline_s` is the single-device baseline: seconds per microbatch of the whole model on the mean device.
    """

    num_times: float
    speedup: float
    baseline_s: float
    lines: tuple[Cause, ...]

    def times(self, key: str) -> float:
        """Return the cost of a cause."""
        return next((line.times for line in self.lines if line.key == key), 0.0)

    @property
    def largest(self) -> Cause:
        """The cause that cost most, except the remainder."""
        return max((line for line in self.lines if line.key != "remainder"), key=lambda line: line.times)

    @property
    def advice(self) -> str:
        """The largest cause and its reason, as a sentence."""
        return f"Most is lost to {self.largest.title}: {self.largest.times:.2f} times. {self.largest.why}."


@dataclass(frozen=True, slots=True)
class _Costs:
    """A stage's mean seconds per microbatch: alone, slower, per byte, fixed per message, and loading.

    Two more values split the seconds of a step: `inflation_s` is what other threads of the process add to computing,
    `foreign_part` the fraction of the time outside computing in which other processes had the core. `backlog` is the
    work after each step.
    """

    alone_s: float
    slower_s: float
    bytes_s: float
    fixed_s: float
    load_s: float
    inflation_s: float
    foreign_part: float
    backlog: Sequence[Backlog]

    def split(self, compute_s: float, beside_s: float) -> dict[str, float]:
        """Return the parts of a step with these seconds in and outside computing."""
        messages_s = beside_s * (1 - self.foreign_part) + self.inflation_s
        slower_s = compute_s - self.inflation_s - self.alone_s + beside_s * self.foreign_part
        return {"alone": self.alone_s, "slower": slower_s, **self._messages(messages_s)}

    def after(self, place: int) -> dict[str, float]:
        """Return the parts of the work after a step for which no message waits."""
        backlog = self.backlog[place]
        return {"slower": backlog.early_s, "load": backlog.load_s, **self._messages(backlog.others_s)}

    def _messages(self, seconds: float) -> dict[str, float]:
        bytes_s = seconds * self.bytes_s / max(1e-12, self.bytes_s + self.fixed_s)
        return {"bytes": bytes_s, "fixed": seconds - bytes_s}


def make_account(run: Run, stream: MeasuredStream | None = None) -> Account:
    """Compute the account of a traced run; measures its stream unless `stream` is given.

    Example:
        account = make_account(read_run("runs/one"))
        account.largest.title, account.largest.times

    Raises `DataError` for an incomplete run.
    """
    stream = stream or measure_stream(run)
    speeds, baseline_s = _reference(stream, run)
    costs = stream_costs(stream, run.facts.threads)
    num = stream.num_microbatches
    num_times = sum(speeds) / (sum(speeds) / len(speeds))
    busiest_s = max(loads_alone(stream).values())
    seconds = [num * baseline_s / num_times, num * busiest_s]
    devices = _recorded(stream, costs)
    counted: set[str] = set()
    for key in _ORDER:
        counted |= _COUNTED[key]
        wires = stream.wires if key == "communication" else {}
        seconds.append(replay(devices, frozenset(counted), wires, depth=stream.depth))
    seconds.append(stream.total_s)
    speedups = [num * baseline_s / taken for taken in seconds]
    keys = ("imbalance", *_ORDER, "remainder")
    why = _reasons(stream, costs, speeds, speedups)
    lines = tuple(
        Cause(key, before - after, why[key]) for key, (before, after) in zip(keys, pairwise(speedups), strict=True)
    )
    return Account(num_times, speedups[-1], baseline_s, lines)


def _reference(stream: MeasuredStream, run: Run) -> tuple[list[float], float]:
    """Return the speeds of devices, and the seconds of the whole model on the mean device."""
    speed = device_speeds({stage.rank: stage.machine for stage in stream.stages}, run.facts.hosts)
    work = sum(stage.share * stage.alone_s * speed[stage.rank] for stage in stream.stages)
    return list(speed.values()), work / (sum(speed.values()) / len(speed))


def device_speeds(machines: Mapping[int, MachineCapacity], names: Sequence[str]) -> dict[int, float]:
    """Return relative speeds of devices by rank, in an arbitrary unit; `names` has every rank's host, or is empty."""
    hosts = {rank: names[rank] if names else str(rank) for rank in machines}
    # processes of one host are equally fast, regardless of a measurement
    rounds = {
        host: statistics.fmean(machines[rank].calibration_s for rank in machines if hosts[rank] == host)
        for host in hosts.values()
    }
    usual = statistics.median(rounds.values())
    # the short calibration is accurate to a quarter: smaller differences are treated as equal
    known = all(rounds.values()) and any(abs(seconds / usual - 1) > _ALIKE for seconds in rounds.values())
    return {r: share(m) / (rounds[hosts[r]] if known else 1.0) for r, m in machines.items()}


def loads_alone(stream: MeasuredStream) -> dict[int, float]:
    """Return by rank the seconds per microbatch of the stream that each device needs for its stages alone."""
    loads: dict[int, float] = defaultdict(float)
    for stage in stream.stages:
        loads[stage.rank] += stage.share * stage.alone_s
    return loads


def stream_costs(stream: MeasuredStream, threads: int) -> dict[int, _Costs]:
    """Split the seconds per microbatch of each stage."""
    ranks: dict[int, list[MeasuredStage]] = defaultdict(list)
    for stage in stream.stages:
        ranks[stage.rank].append(stage)
    costs: dict[int, _Costs] = {}
    for mates in ranks.values():
        backlog = backlog_in_waits(mates, threads)
        costs |= {stage.index: _stage_costs(stage, mates, backlog[stage.index], threads) for stage in mates}
    return costs


def _stage_costs(
    stage: MeasuredStage, mates: Sequence[MeasuredStage], backlog: Sequence[Backlog], threads: int
) -> _Costs:
    """Split the seconds of a stage per microbatch.

    If it computes longer than its CPU time explains, other threads of its process, which handle messages, may have had
    the core. The remaining difference from running alone has other causes: other processes, caches, heat.
    """
    part = share(stage.machine)
    compute_s, beside_s = stage.mean("compute_s"), stage.mean("beside_s")
    others_s = other_threads_cpu_s(mates) / part
    off_s = compute_s - stage.mean("cpu_s") / part
    inflation_s = min(max(0.0, off_s), others_s) if threads == 1 else 0.0
    foreign_s = max(0.0, beside_s - stage.mean("between_cpu_s") / part - (others_s - inflation_s))
    foreign_part = min(1.0, foreign_s / beside_s) if beside_s and threads == 1 else 0.0
    early_s, hidden_s, load_s = (fmean(getattr(o, key) for o in backlog) for key in ("early_s", "others_s", "load_s"))
    messages_s = beside_s * (1 - foreign_part) + inflation_s + hidden_s
    bytes_s = min(messages_s, (stage.mean("num_bytes_in") + stage.mean("num_bytes_out")) * stage.machine.byte_s / part)
    return _Costs(
        alone_s=stage.alone_s,
        bytes_s=bytes_s,
        fixed_s=messages_s - bytes_s,
        load_s=load_s,
        slower_s=compute_s + early_s - inflation_s - stage.alone_s + beside_s * foreign_part,
        inflation_s=inflation_s,
        foreign_part=foreign_part,
        backlog=backlog,
    )


def _recorded(stream: MeasuredStream, costs: Mapping[int, _Costs]) -> list[list[Recorded]]:
    """Return the recorded work of a stream by parts: first of the driver, then of each device."""
    num = stream.num_microbatches
    firsts = [stream.routes[stream.turns[m % len(stream.turns)]].start for m in range(num)]
    feeder = [
        Recorded(source=None, target=(FEEDER_STAGE, first), parts={"load": seconds})
        for first, seconds in zip(firsts, stream.load_s, strict=True)
    ]
    steps: dict[int, list[Recorded]] = {stage.rank: [] for stage in stream.stages}
    for route in stream.routes:
        for place in range(len(stream.stages[route.start].steps)):
            for index in route:
                stage, cost = stream.stages[index], costs[index]
                step = stage.steps[place]
                source: Edge = (index - 1 if index > route.start else FEEDER_STAGE, index)
                target: Edge = (index, index + 1 if index + 1 < route.stop else FEEDER_STAGE)
                parts = cost.split(step.compute_s, step.beside_s)
                steps[stage.rank].append(Recorded(source=source, target=target, parts=parts, after=cost.after(place)))
    return [feeder, *steps.values()]


def _reasons(
    stream: MeasuredStream, costs: Mapping[int, _Costs], speeds: list[float], speedups: list[float]
) -> dict[str, str]:
    """Return for every cause a sentence with the figures."""
    num = stream.num_microbatches
    loads = loads_alone(stream)
    busiest = max(loads, key=lambda rank: loads[rank])
    slowest = max(stream.stages, key=lambda s: costs[s.index].slower_s)
    slower, talker = costs[slowest.index], max(stream.stages, key=lambda s: costs[s.index].bytes_s)
    chatty = max(stream.stages, key=lambda s: costs[s.index].fixed_s)
    wires = {edge: statistics.median(wire) for edge, wire in stream.wires.items()}
    edge, wire_s = max(wires.items(), key=lambda pair: pair[1])
    first = edge[0] < 0
    crossing = stream.stages[edge[1] if first else edge[0]].mean("num_bytes_in" if first else "num_bytes_out")
    return {
        "imbalance": imbalance_reason(stream, loads, busiest, speeds),
        "bubble": f"{num} microbatches through {shape_of(stream)}: while pipelines fill and drain, devices wait",
        "slower": _slower_reason(slowest, slower),
        "communication_cpu": f"stage {talker.index} handles "
        f"{format_bytes(talker.mean('num_bytes_in') + talker.mean('num_bytes_out'))} per microbatch, which takes "
        f"{format_seconds(costs[talker.index].bytes_s)} of its time",
        "overhead": f"stage {chatty.index} spends {format_seconds(costs[chatty.index].fixed_s)} per microbatch "
        f"outside computing, for messages of any size; it computes {format_seconds(chatty.mean('compute_s'))}",
        "loading": f"a microbatch takes {format_seconds(sum(stream.load_s) / num)} to load",
        "communication": f"a message {edge_name(edge)} of {format_bytes(crossing)} takes "
        f"{format_seconds(wire_s)}; the busiest device computes for {format_seconds(loads[busiest])} alone",
        "remainder": f"the replay with all of these takes {abs(speedups[-2] / speedups[-1] - 1):.1%} "
        f"{'less' if speedups[-2] > speedups[-1] else 'more'} than was measured",
    }


def _slower_reason(stage: MeasuredStage, costs: _Costs) -> str:
    """Describe a stage's computing seconds, the part attributed to slower computing, and the rest."""
    compute_s = stage.mean("compute_s")
    text = (
        f"stage {stage.index} on {stage.device} computes {format_seconds(compute_s)} per microbatch, "
        f"{format_seconds(costs.alone_s)} alone"
    )
    if 0 <= costs.slower_s <= compute_s - costs.alone_s:
        return f"{text}; {format_seconds(costs.slower_s)} of the difference count here, the rest is due to its messages"
    if costs.slower_s > 0:
        return f"{text}; {format_seconds(costs.slower_s)} count here, as other work had its core between steps too"
    return f"{text}; its messages account for more than the difference"


def shape_of(stream: MeasuredStream) -> str:
    """Describe the number of a stream's stages and parallel pipelines.

    Example:
        "2 stages", "2 pipelines of 1 stage"
    """
    counts = sorted({len(route) for route in stream.routes})
    stages = f"{' or '.join(map(str, counts))} stage{'s' if counts != [1] else ''}"
    return stages if len(stream.routes) == 1 else f"{len(stream.routes)} pipelines of {stages}"


def edge_name(edge: Edge) -> str:
    """Return the name of a cut, from the stages around it."""
    if edge[0] < 0:
        return f"into stage {edge[1]}"
    return f"from stage {edge[0]} {f'to stage {edge[1]}' if edge[1] >= 0 else 'back to the driver'}"


def imbalance_reason(stream: MeasuredStream, loads: dict[int, float], busiest: int, speeds: list[float]) -> str:
    """Describe whether the busiest device has more work or is slower than the others."""
    ranks = list(dict.fromkeys(stage.rank for stage in stream.stages))
    mean_speed = sum(speeds) / len(speeds)
    speed = speeds[ranks.index(busiest)] / mean_speed
    work = {rank: loads[rank] * speeds[place] for place, rank in enumerate(ranks)}
    part = work[busiest] * len(ranks) / sum(work.values())
    name = next(stage.device for stage in stream.stages if stage.rank == busiest)
    held = ", ".join(str(stage.index) for stage in stream.stages if stage.rank == busiest)
    if part >= 1 / speed:
        return f"uneven stages: {name} (stage {held}) has {part:.2f} times an equal part of the work"
    return f"slow host: {name} (stage {held}) has {speed:.2f} times the mean device's speed"
