"""What would make a training quicker, played by the simulator with what its steps took."""

from penstock.plan.schedule.actions import BACKWARD_PARTS, Action
from penstock.plan.schedule.schedules import SCHEDULES, make_schedule
from penstock.plan.schedule.simulate import Duration, simulate
from penstock.report.stream.account import Account
from penstock.report.training.steps import MeasuredTraining
from penstock.tracing.trace import Run

# what is gained less than this is not worth a sentence
_WORTH = 0.01


def advise_training(run: Run, training: MeasuredTraining, account: Account) -> list[str]:
    """Describe what most is lost to, and which schedule or number of microbatches would lose less.

    Example:
        print("\\n".join(advise_training(run, training, account)))
    """
    lines = [account.advice]
    replica = training.replicas[0]
    devices = list(dict.fromkeys(replica))
    if len(devices) < 2 or list(replica) != devices:
        return lines
    seconds = _seconds(training)
    num = len({done.microbatch for done in training.steps[0].parts[devices[0]].done})

    def played(schedule: str, count: int) -> float:
        # more microbatches are smaller in proportion
        return num / count * simulate(make_schedule(schedule, len(replica), count), seconds).makespan_s

    here = played(run.facts.schedule, num) if run.facts.schedule in SCHEDULES else None
    for name in ("1f1b", "zero-bubble") if here is not None else ():
        for count in (num, 2 * num):
            gain = here / played(name, count) - 1 if here is not None else 0.0
            if gain > _WORTH:
                lines.append(
                    f"With the schedule {name} and {count} microbatches, {gain:.1%} more rows/s by the simulator"
                    f"{', if half as many rows take half as long' if count != num else ''}."
                )
    return lines


def _seconds(training: MeasuredTraining) -> Duration:
    """Return what an action took on average."""
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
