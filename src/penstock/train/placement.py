"""Which rank holds which stage of which replica."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import UsageError
from penstock.plan.pipelines import SCHEDULES, make_schedule
from penstock.plan.read import read_schedule
from penstock.plan.schedule import Schedule, placement
from penstock.plan.validate import check_schedule


@dataclass(frozen=True, slots=True)
class Replica:
    """One whole pipeline: its ranks in the order of devices, and the rank of every stage."""

    devices: tuple[int, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Replicas times stages, over the ranks of a world.

    replica 0   rank 0: stage 0   rank 1: stage 1
    replica 1   rank 2: stage 0   rank 3: stage 1
    """

    replicas: tuple[Replica, ...]

    def replica_of(self, rank: int) -> int:
        """Give the replica that a rank belongs to."""
        return next(index for index, replica in enumerate(self.replicas) if rank in replica.devices)

    def stages_of(self, rank: int) -> list[int]:
        """Give the stages that a rank holds."""
        replica = self.replicas[self.replica_of(rank)]
        return [stage for stage, holder in enumerate(replica.stages) if holder == rank]

    def holders(self, stage: int) -> list[int]:
        """Give the rank of a stage in every replica."""
        return [replica.stages[stage] for replica in self.replicas]


class ScheduleChoice:
    """A schedule by name or as a user's text, for any number of microbatches.

    Example:
        ScheduleChoice("1f1b").make(num_stages=4, num_microbatches=8, num_devices=4)
    """

    def __init__(self, schedule: str, num_buffers: int) -> None:
        self.name = schedule
        self._num_buffers = num_buffers
        if schedule not in SCHEDULES and not any(c.isspace() for c in schedule):
            raise UsageError(
                f"the schedule {schedule!r} is not known; use one of {', '.join(SCHEDULES)}, or write your own"
            )
        self._own = read_schedule(schedule) if schedule not in SCHEDULES else None
        self._made: dict[tuple[int, int, int], Schedule] = {}

    def make(self, num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
        """Make the schedule and check that it can be run.

        Raises `PlanError` for one that cannot, `UsageError` where a user's own is for other counts.
        """
        key = (num_stages, num_microbatches, num_devices)
        if key not in self._made:
            made = self._own or make_schedule(self.name, *key)
            check_schedule(made, num_buffers=self._num_buffers)
            self._check_counts(made, *key)
            self._made[key] = made
        return self._made[key]

    def places(self, num_stages: int, num_devices: int) -> list[int]:
        """Give the device of every stage."""
        schedule = self._own or self.make(num_stages, 1, num_devices)
        self._check_counts(schedule, num_stages, None, num_devices)
        return [device for _, device in sorted(placement(schedule).items())]

    def _check_counts(self, made: Schedule, num_stages: int, num_microbatches: int | None, num_devices: int) -> None:
        microbatches = len({a.microbatch for actions in made for a in actions if a.kind == "F"})
        backwards = any(action.kind in {"B", "I"} for actions in made for action in actions)
        has = (len(placement(made)), num_microbatches and microbatches, len(made))
        if has != (num_stages, num_microbatches, num_devices) or not backwards:
            raise UsageError(
                f"your schedule is for {has[0]} stages, {microbatches} microbatches and {has[2]} devices"
                f"{'' if backwards else ' and has no backwards'}, but there are {num_stages}, "
                f"{num_microbatches or microbatches} and {num_devices}; write one for these counts"
            )


def make_grid(devices: Sequence[int], stages: int | None, replicas: int | None, choice: ScheduleChoice) -> Grid:
    """Divide ranks into replicas, as even as they can be, and place the stages of each.

    Without either count every rank is a stage; without replicas there are as many as fit. Raises
    `UsageError` where a rank would be without a stage.
    """
    count = len(devices)
    replicas = replicas or (max(1, count // stages) if stages else 1)
    stages = stages or -(-count // replicas)
    if min(replicas, stages) < 1 or replicas > count or -(-count // replicas) > stages:
        raise UsageError(
            f"{count} processes cannot be {replicas} replicas of {stages} stages without one being left over; "
            f"use {count} processes as stages={count}, or as replicas={count}, or start another number"
        )
    each, more = divmod(count, replicas)
    made, first = [], 0
    for index in range(replicas):
        own = tuple(devices[first : first + each + (index < more)])
        first += len(own)
        made.append(Replica(own, tuple(own[device] for device in choice.places(stages, len(own)))))
    return Grid(tuple(made))


def shares(num_rows: int, num_parts: int) -> list[range]:
    """Divide rows into parts that follow each other and differ by one row at most; some are empty if there are few.

    >>> shares(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    each, more = divmod(num_rows, num_parts)
    starts = [part * each + min(part, more) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
