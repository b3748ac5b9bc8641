"""The account of a training run: the difference between n devices and the speed-up of its steps, split by cause.

As for a stream, each line is the difference between two speed-ups, the second with one more cost. The replays use the
simulator: each step's own actions, in the devices' recorded order. `docs/account.md` has the definition.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from penstock.plan.schedule.schedules import BACKWARD_PARTS, SCHEDULES, Action, Kind, make_schedule
from penstock.plan.schedule.simulate import Crossing, Duration, simulate
from penstock.report.advice import Advice
from penstock.report.stream_account import Account, Cause, device_speeds
from penstock.report.stream_measured import share
from penstock.report.training_measured import DevicePart, MeasuredTraining, StepTimes, TimedAction
from penstock.text import counted
from penstock.tracing.trace import Run
from penstock.units import format_bytes, format_seconds

# replays of a step: each includes one more cost
_ORDER = ("bubble", "slower", "communication_cpu", "overhead", "between", "loading", "communication", "synchronization")
_COUNTED = {
    "bubble": "alone",
    "slower": "slower",
    "communication_cpu": "bytes",
    "overhead": "fixed",
    "between": "between",
    "loading": "load",
    "communication": "lines",
    "synchronization": "synchronize",
}
# pseudo-microbatch for a device's work before its first scheduled action
_BEFORE = -1
_AS_SCHEDULED: Mapping[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W", "R": "U"}


@dataclass(frozen=True, slots=True)
class Usual:
    """Seconds of an action alone, by rank, stage and kind."""

    seconds: Mapping[tuple[int, int, str], float]

    def of(self, rank: int, done: TimedAction) -> float:
        """Return the usual seconds of this action."""
        return self.seconds[rank, done.stage, done.kind]

    def load(self, part: DevicePart) -> float:
        """Return the seconds of a device's part of a step when alone, without the optimizer's update."""
        return sum(self.of(part.rank, done) for done in part.done)


def usual_seconds(training: MeasuredTraining, threads: int) -> Usual:
    """Estimate the seconds of actions on an otherwise idle machine.

    No action is rerun, because that would change gradients and statistics. With one thread, CPU seconds are used,
    otherwise the fastest tenth of the actions.
    """
    found: dict[tuple[int, int, str], list[TimedAction]] = {}
    for step in training.steps:
        for rank, part in step.parts.items():
            for done in part.done:
                found.setdefault((rank, done.stage, done.kind), []).append(done)
    seconds = {}
    for key, actions in found.items():
        cpu_s = statistics.median(done.cpu_s for done in actions) / share(training.processes[key[0]].machine)
        seconds[key] = cpu_s if threads == 1 else sorted(done.compute_s for done in actions)[len(actions) // 10]
    return Usual(seconds)


def make_training_account(run: Run, training: MeasuredTraining) -> Account:
    """Compute the account of a traced training run; `baseline_s` is a step on the mean device.

    Example:
        make_training_account(run, measure_training(run)).largest.title
    """
    usual = usual_seconds(training, run.facts.threads)
    speeds = device_speeds({rank: each.machine for rank, each in training.processes.items()}, run.facts.hosts)
    mean_speed = statistics.fmean(speeds.values())
    parts = [step.parts for step in training.steps]
    work = sum(usual.load(part) * speeds[rank] for step in parts for rank, part in step.items())
    # a single device would update each weight once, not once per replica
    updates = sum(step[rank].update_s * speeds[rank] for step in parts for rank in set(training.replicas[0]))
    baseline_s, num_times = (work + updates) / mean_speed, sum(speeds.values()) / mean_speed
    seconds = [baseline_s / num_times]
    seconds.append(sum(max(map(usual.load, step.values())) for step in parts) + updates / sum(speeds.values()))
    seconds.append(sum(max(usual.load(part) + part.update_s for part in step.values()) for step in parts))
    counted: set[str] = set()
    for key in _ORDER:
        counted.add(_COUNTED[key])
        seconds.append(sum(play_step(training, step, usual, counted) for step in training.steps))
    seconds.append(training.seconds)
    speedups = [baseline_s / taken for taken in seconds]
    why = _reasons(run, training, usual, speedups)
    lines = tuple(
        Cause(key, before - after, why[key])
        for key, (before, after) in zip(("imbalance", "update", *_ORDER, "remainder"), pairwise(speedups), strict=True)
    )
    return Account(num_times, speedups[-1], baseline_s / len(training.steps), lines)


def play_step(training: MeasuredTraining, step: StepTimes, usual: Usual, counted: set[str]) -> float:
    """Replay a step with the counted costs; return the seconds."""
    seconds = max(_play_replica(training, step, replica, usual, counted) for replica in training.replicas)
    # the last rank does not wait: its remaining seconds are the cost of the reduction
    still_s = min(part.synchronize_s for part in step.parts.values())
    return seconds + (still_s if "synchronize" in counted else 0.0)


def _play_replica(
    training: MeasuredTraining, step: StepTimes, replica: tuple[int, ...], usual: Usual, counted: set[str]
) -> float:
    ranks = list(dict.fromkeys(replica))
    schedule, seconds = [], {}
    for device, rank in enumerate(ranks):
        part = step.parts[rank]
        actions = [Action("U", _BEFORE, replica.index(rank))]
        seconds[device, actions[0]] = _before_s(part, counted)
        for done in part.done:
            actions.append(Action(_AS_SCHEDULED[done.kind], done.microbatch, done.stage))
            seconds[device, actions[-1]] = _action_s(training, part.rank, done, usual, counted)
        schedule.append(tuple(actions))

    lines: dict[tuple[int, int, Crossing], float] = {}
    for (source, to, direction), taken_s in training.lines_s.items() if "lines" in counted else ():
        kind: Crossing = "activations" if direction == "F" else "gradients"
        lines[ranks.index(replica[source]), ranks.index(replica[to]), kind] = taken_s
    played = simulate(
        tuple(schedule), lambda action, device: seconds[device, action], lambda *line: lines.get(line, 0.0)
    )
    return played.makespan_s


def _before_s(part: DevicePart, counted: set[str]) -> float:
    """Return the seconds of a device's work before its first action, including the previous step's update."""
    more = {"fixed": part.rest_s, "between": part.between_s, "load": part.load_s}
    return part.update_s + sum(seconds for name, seconds in more.items() if name in counted)


def _action_s(training: MeasuredTraining, rank: int, done: TimedAction, usual: Usual, counted: set[str]) -> float:
    machine = training.processes[rank].machine
    bytes_s = min(done.message_s, done.num_bytes * machine.byte_s / share(machine))
    alone_s = usual.of(rank, done)
    more = {"slower": done.compute_s - alone_s, "bytes": bytes_s, "fixed": done.message_s - bytes_s}
    return max(0.0, alone_s + sum(seconds for name, seconds in more.items() if name in counted))


def _reasons(run: Run, training: MeasuredTraining, usual: Usual, speedups: list[float]) -> dict[str, str]:
    """Return for every cause a sentence with the figures."""
    steps, devices = training.steps, run.facts.devices
    num = len(steps)

    def mean(rank: int, field: str) -> float:
        return statistics.fmean(getattr(step.parts[rank], field) for step in steps)

    ranks = list(training.processes)
    loads = {rank: sum(usual.load(step.parts[rank]) for step in steps) / num for rank in ranks}
    actual = {rank: mean(rank, "computed_s") for rank in ranks}
    updates = {rank: mean(rank, "update_s") for rank in ranks}
    busiest = max(ranks, key=lambda rank: loads[rank])
    updater = max(ranks, key=lambda rank: updates[rank])
    slowest = max(ranks, key=lambda rank: actual[rank] - loads[rank])
    messages = {r: sum(d.message_s for step in steps for d in step.parts[r].done) / num for r in ranks}
    crossing = {r: sum(d.num_bytes for step in steps for d in step.parts[r].done) / num for r in ranks}
    talker = max(ranks, key=lambda rank: crossing[rank])
    loader = max(ranks, key=lambda rank: mean(rank, "load_s"))
    resting = max(ranks, key=lambda rank: mean(rank, "rest_s"))
    caller = max(ranks, key=lambda rank: mean(rank, "between_s"))
    longest = max(training.lines_s.items(), key=lambda item: item[1], default=None)
    last_s = sum(min(part.synchronize_s for part in step.parts.values()) for step in steps) / num
    microbatches = len({d.microbatch for d in steps[0].parts[training.replicas[0][0]].done})
    return {
        "imbalance": f"{devices[busiest]} computes {format_seconds(loads[busiest])} per step alone, the mean device "
        f"{format_seconds(statistics.fmean(loads.values()))}",
        "update": f"{devices[updater]} updates its weights in {format_seconds(updates[updater])} per step, the mean "
        f"device in {format_seconds(statistics.fmean(updates.values()))}"
        + (", and each replica updates all of them" if len(training.replicas) > 1 else ""),
        "bubble": f"{counted(microbatches, 'microbatch')} per step go forth and back through "
        f"{counted(len(training.replicas[0]), 'stage')}",
        "slower": f"{devices[slowest]} computes {format_seconds(actual[slowest])} per step, "
        f"alone {format_seconds(loads[slowest])}",
        "communication_cpu": f"{devices[talker]} handles {format_bytes(crossing[talker])} per step in "
        f"{format_seconds(messages[talker])}",
        "overhead": f"{devices[resting]} spends {format_seconds(mean(resting, 'rest_s'))} per step outside its actions",
        "between": f"the code between two steps takes {format_seconds(mean(caller, 'between_s'))} on {devices[caller]}",
        "loading": f"{devices[loader]} loads a batch in {format_seconds(mean(loader, 'load_s'))}",
        "communication": "no message was waited for"
        if longest is None
        else f"a message from stage {longest[0][0]} to stage {longest[0][1]} takes {format_seconds(longest[1])}",
        "synchronization": f"adding up gradients and losses takes {format_seconds(last_s)} per step after the last "
        "backward",
        "remainder": f"the replay with all of these takes {abs(speedups[-2] / speedups[-1] - 1):.1%} "
        f"{'less' if speedups[-2] > speedups[-1] else 'more'} than was measured",
    }


# smaller gains are not reported
_WORTH = 0.01


def advise_training(run: Run, training: MeasuredTraining, account: Account) -> Advice:
    """Describe the largest cause of lost time, and a schedule or number of microbatches that would lose less.

    Example:
        print("\\n".join(advise_training(run, training, account).lines))
    """
    lines: list[str] = []
    replica = training.replicas[0]
    devices = list(dict.fromkeys(replica))
    if len(devices) < 2 or list(replica) != devices or run.facts.schedule not in SCHEDULES:
        return Advice((account.advice,))
    seconds = _seconds(training)
    num = len({done.microbatch for done in training.steps[0].parts[devices[0]].done})

    def played(schedule: str, count: int) -> float:
        # with more microbatches, each is proportionally smaller
        return num / count * simulate(make_schedule(schedule, len(replica), count), seconds).makespan_s

    here = played(run.facts.schedule, num)
    # the simulator's error on the measured schedule limits its accuracy for other schedules
    error = abs(here / statistics.fmean(step.seconds for step in training.steps) - 1)
    for name in (name for name, known in SCHEDULES.items() if known.advised):
        for count in (num, 2 * num):
            gain = here / played(name, count) - 1
            if gain > max(error, _WORTH):
                lines.append(
                    f"With the schedule {name} and {count} microbatches, {gain:.1%} more rows/s by the simulator"
                    f"{', if half as many rows take half as long' if count != num else ''}."
                )
    return Advice((account.advice,), tuple(lines))


def _seconds(training: MeasuredTraining) -> Duration:
    """Return the mean seconds of each action."""
    replica = training.replicas[0]
    forward, backward = [], []
    for stage, rank in enumerate(replica):
        done = training.of_stage(rank, stage)
        num = sum(d.kind == "F" for d in done)
        forward.append(sum(d.compute_s for d in done if d.kind == "F") / num)
        backward.append(sum(d.compute_s for d in done if d.kind != "F") / num)

    def duration(action: Action, _device: int) -> float:
        return forward[action.stage] if action.kind == "F" else BACKWARD_PARTS[action.kind] * backward[action.stage]

    return duration
