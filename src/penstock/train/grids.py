"""Which rank holds which stage of which replica."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from penstock.engine.placement import Grid, Replica
from penstock.errors import UsageError
from penstock.plan.schedule.actions import Schedule, placement
from penstock.plan.schedule.schedules import SCHEDULES, make_schedule, spread
from penstock.plan.schedule.text import read_schedule
from penstock.plan.schedule.validate import check_schedule
from penstock.spec.plan import Plan


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
        if self._own and any(action.kind == "U" for actions in self._own for action in actions):
            raise UsageError("your schedule updates weights with U, which optimizer.step() does; leave U out")
        self._made: dict[tuple[int, int, int], Schedule] = {}

    def of(self, replica: Replica, num_microbatches: int) -> Schedule:
        """Make the schedule of a replica, its stages on the devices where they are; raises what `make` raises."""
        if replica.num_microbatches is None or self.name == "interleaved":
            return self.make(len(replica.stages), num_microbatches, len(replica.devices))
        counts = [replica.stages.count(rank) for rank in replica.devices]
        return spread(self.make(len(counts), num_microbatches, len(counts)), counts)

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
        """Return the device of every stage."""
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


def plan_grid(plan: Plan, ranks: Mapping[str, int], places: Mapping[str, int]) -> tuple[Grid, list[str]]:
    """Place a plan's pipelines, and return the names of the cuts of all of them, in the order of the model.

    `ranks` are those of the plan's devices, `places` where each of its cuts lies. All replicas have the same stages:
    where their cuts differ, a stage ends at each cut of any, and a device has several neighbouring ones.

        one pipeline    a: ──────────┃ b: ────     stages 0 and 1 on a, 2 on b
        another         c: ────┃ d: ──────────     stage 0 on c, 1 and 2 on d

    Example:
        grid, cuts = plan_grid(plan, {"desk": 0, "board": 1}, {"blocks.5:after": 90})
    """
    own = [pipeline.cut_sets[0].cuts for pipeline in plan.pipelines]
    cuts = sorted({name for names in own for name in names}, key=places.__getitem__)
    replicas = []
    for pipeline, names, count in zip(plan.pipelines, own, plan.microbatches, strict=True):
        holders = [ranks[stage.devices[0]] for stage in pipeline.stages]
        before = accumulate((name in names for name in cuts), initial=0)
        replicas.append(Replica(tuple(dict.fromkeys(holders)), tuple(holders[number] for number in before), count))
    return Grid(tuple(replicas)), cuts
