"""What a process still needs after a step, found where its stages wait.

No process is quicker than its CPU seconds over its CPUs, but a step may be: what its process's other threads need, and
what it computed sooner than its share of a core gives, is its backlog. A step that was held up pays, so does a wait:

    backlog grows by   (CPU seconds of the step, and of other threads meanwhile) / CPUs  -  the step's seconds
            falls by   what the stage waits for room or for a message; it is never below zero

What a wait has paid belongs after the step before it: in a replay in which that wait is shorter, the next step has to
come later. So it is as uneven as the run was, and never more than the stage waited there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.report.stream.measured import MeasuredStage, Step, share


@dataclass(frozen=True, slots=True)
class Backlog:
    """Seconds that follow a step: for computing that was early, for the process's other threads, for loading."""

    early_s: float
    others_s: float
    load_s: float


def backlog_in_waits(mates: Sequence[MeasuredStage], threads: int) -> dict[int, list[Backlog]]:
    """Return for each stage of one process what waits have paid after each of its steps.

    Example:
        backlog_in_waits([stage], threads=1)[stage.index][microbatch].others_s
    """
    steps = [(stage, step) for row in zip(*(stage.steps for stage in mates), strict=True)
             for stage, step in zip(mates, row, strict=True)]  # fmt: skip
    others_cpu_s = other_threads_cpu_s(mates)
    lacks = [_lacks(stage, step, others_cpu_s, len(mates), threads) for stage, step in steps]
    early, without, whole = (_paid([step for _, step in steps], lack) for lack in zip(*lacks, strict=True))
    found: dict[int, list[Backlog]] = {stage.index: [] for stage in mates}
    for (stage, _), e, w, all_of_it in zip(steps, early, without, whole, strict=True):
        found[stage.index].append(Backlog(e, w - e, all_of_it - w))
    return found


def other_threads_cpu_s(mates: Sequence[MeasuredStage]) -> float:
    """Return the CPU seconds per step of a process's threads that do not compute, loading apart."""
    own_s = sum(mate.mean("cpu_s") + mate.mean("between_cpu_s") for mate in mates)
    return max(0.0, mates[0].cpu_s - own_s) / len(mates)


def _lacks(
    stage: MeasuredStage, step: Step, others_cpu_s: float, num_mates: int, threads: int
) -> tuple[float, float, float]:
    """Return what a step lacks, each with one more: its own computing, other threads, loading."""
    without = (step.cpu_s + step.between_cpu_s + others_cpu_s) / stage.machine.cpus - step.busy_s
    early = step.cpu_s / share(stage.machine) - step.compute_s if threads == 1 else 0.0
    return min(early, without), without, without + stage.load_cpu_s / stage.machine.cpus / num_mates


def _paid(steps: Sequence[Step], lacks: Sequence[float]) -> list[float]:
    """Return what waits pay after each step."""
    paid: list[float] = []
    backlog_s = 0.0
    for step, lack in zip(steps, lacks, strict=True):
        if paid:  # the first one waits for the stream to begin
            before_s = min(backlog_s, step.arrived_s - step.asked_s)
            paid[-1] += before_s
            backlog_s -= before_s
        backlog_s = max(0.0, backlog_s + lack)
        paid.append(min(backlog_s, step.buffer_s))
        backlog_s -= paid[-1]
    return paid
