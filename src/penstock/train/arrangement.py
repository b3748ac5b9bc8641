"""Placement of a training run: ranks of all stages, microbatches and schedule."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from penstock.deploy.deployment import ranks_of
from penstock.deploy.policies import choose_cuts, cuts_of_plan
from penstock.deploy.run_options import CutOptions
from penstock.engine.placement import Grid, Replica, shares
from penstock.errors import PlanError, UsageError
from penstock.graph.cuts import Cut, Cuts, graph_fingerprint
from penstock.graph.graph import Graph, check_whole
from penstock.group.world import World
from penstock.plan.candidates import PlanRequest
from penstock.plan.check import check_purpose
from penstock.plan.choose import make_plan
from penstock.plan.schedule.custom import check_given, check_schedule, find_schedule, read_schedule
from penstock.plan.schedule.schedules import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    Schedule,
    interleaves,
    make_schedule,
    placement,
    spread,
    with_recompute,
    with_updates,
)
from penstock.spec.cluster import Cluster
from penstock.spec.plan import Plan
from penstock.spec.profile import Profile
from penstock.text import counted
from penstock.train.captured import Captured
from penstock.wire import NUM_BUFFERS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Training options: replicas, schedule, microbatches and gradient computation."""

    replicas: int | None = None
    schedule: str = DEFAULT_SCHEDULE
    microbatches: int | None = None
    seed: int = 0
    autocast: torch.dtype | None = None
    checkpointing: bool = False


class ScheduleChoice:
    """A schedule: by name, for any number of microbatches, or a custom schedule as text or file.

    Example:
        ScheduleChoice("1f1b").make(num_stages=4, num_microbatches=8, num_devices=4)
    """

    def __init__(self, schedule: str, num_buffers: int) -> None:
        self.name = schedule = find_schedule(schedule)
        self._num_buffers = num_buffers
        self._own = read_schedule(schedule) if schedule not in SCHEDULES else None
        if self._own and any(action.kind == "U" for actions in self._own for action in actions):
            raise UsageError("your schedule must not contain U, because optimizer.step() updates weights; remove U")
        self._made: dict[tuple[int, int, int], Schedule] = {}

    @property
    def splits_backward(self) -> bool:
        """True if the gradients of weights are computed in actions of their own."""
        return self.name == "zero-bubble" or any(a.kind == "W" for actions in self._own or () for a in actions)

    def of(self, replica: Replica, num_microbatches: int) -> Schedule:
        """Return the schedule of a replica for its placed stages; raises the same errors as `make`."""
        counts = [count for rank in replica.devices if (count := replica.stages.count(rank))]
        if replica.num_microbatches is None or interleaves(self.name):
            made = iter(self.make(len(replica.stages), num_microbatches, len(counts)))
        else:
            made = iter(spread(self.make(len(counts), num_microbatches, len(counts)), counts))
        return tuple(next(made) if rank in replica.stages else () for rank in replica.devices)

    def make(self, num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
        """Return a validated schedule for these counts.

        Raises `UsageError` for a custom schedule that cannot run or is for other counts.
        """
        key = (num_stages, num_microbatches, num_devices)
        if key not in self._made:
            made = self._own or make_schedule(self.name, *key)
            (check_given if self._own else check_schedule)(made, num_buffers=self._num_buffers)
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
        if not backwards:
            raise UsageError("your schedule has no backwards, so it cannot train; add them")
        if has != (num_stages, num_microbatches, num_devices):
            pairs = {"stages": (has[0], num_stages), "microbatches": (microbatches, num_microbatches or microbatches)}
            fixes = [f"{name}={its} (--{name} {its})" for name, (its, now) in pairs.items() if its != now]
            way = f"give {' and '.join(fixes)}, or write" if fixes else "write"
            raise UsageError(
                f"your schedule is for {counted(has[0], 'stage')}, {counted(microbatches, 'microbatch')} and "
                f"{counted(has[2], 'device')}, "
                f"but this run has {num_stages}, "
                f"{num_microbatches or microbatches} and {num_devices}; {way} one for these counts"
            )


def make_grid(devices: Sequence[int], stages: int | None, replicas: int | None, choice: ScheduleChoice) -> Grid:
    """Divide ranks evenly into replicas, and place the stages of each.

    With neither `stages` nor `replicas` there is one replica with a stage on each rank; with `stages` alone, as many
    replicas as fit. Raises `UsageError` if a rank would have no stage.
    """
    count = len(devices)
    replicas = replicas or (max(1, count // stages) if stages else 1)
    stages = stages or -(-count // replicas)
    if min(replicas, stages) < 1 or replicas > count or -(-count // replicas) > stages:
        ways = dict.fromkeys([f"stages={count} and replicas=1", f"stages=1 and replicas={count}"])
        raise UsageError(
            f"{counted(count, 'process')} cannot be {counted(replicas, 'replica')} of {counted(stages, 'stage')}: "
            f"each replica needs a process, and each process a stage; start {replicas * stages}, as with torchrun "
            f"--nproc-per-node {replicas * stages}, pass {' or '.join(ways)}, or leave replicas out, which uses all "
            "processes"
        )
    each, more = divmod(count, replicas)
    made, first = [], 0
    for index in range(replicas):
        own = tuple(devices[first : first + each + (index < more)])
        first += len(own)
        made.append(Replica(own, tuple(own[device] for device in choice.places(stages, len(own)))))
    return Grid(tuple(made))


def plan_grid(plan: Plan, ranks: Mapping[str, int], places: Mapping[str, int]) -> tuple[Grid, list[str]]:
    """Place a plan's pipelines, and return the names of all their cuts, in the order of the model.

    `ranks` has the rank of each device of the plan, `places` the position of each cut. All replicas have the same
    stages: if their cuts differ, the model is divided at the cuts of all replicas, and a device holds several
    neighbouring stages.

        one pipeline    a: ──────────┃ b: ────     stages 0 and 1 on a, 2 on b
        another         c: ────┃ d: ──────────     stage 0 on c, 1 and 2 on d

    Example:
        grid, cuts = plan_grid(plan, {"desk": 0, "board": 1}, {"blocks.5:after": 90})
    """
    own = [pipeline.cut_sets[0].cuts for pipeline in plan.pipelines]
    cuts = sorted({name for names in own for name in names}, key=places.__getitem__)
    replicas = []
    for pipeline, names, count in zip(plan.pipelines, own, plan.microbatches, strict=True):
        holders = [ranks[stage.device] for stage in pipeline.stages]
        before = accumulate((name in names for name in cuts), initial=0)
        replicas.append(Replica(tuple(dict.fromkeys(holders)), tuple(holders[number] for number in before), count))
    return Grid(tuple(replicas)), cuts


class Arrangement:
    """The placement of a training run, as seen by one process: all ranks, and this process's replica.

    `grid` has every stage's rank; `cuts` separate the stages. The first `skipped` stages do not run in a step: their
    outputs are read from a cache. `moved` returns the placement of the same run on another grid.
    """

    def __init__(
        self, rank: int, grid: Grid, cuts: Sequence[Cut], choice: ScheduleChoice, *, microbatches: int | None = None,
        checkpointing: bool = False, skipped: int = 0, asked: bool | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.grid, self.cuts, self.skipped = rank, grid, list(cuts), skipped
        self._choice, self._checkpointing = choice, checkpointing
        self.schedule_name = choice.name  # the schedule's text if it is custom
        self.splits_backward = choice.splits_backward
        self.num_stages = len(grid.replicas[0].stages)
        self.replica_index = grid.replica_of(rank)
        self.replica: Replica = grid.replicas[self.replica_index]
        # True if the user or a plan set the number of microbatches
        self._asked = (microbatches or self.replica.num_microbatches) is not None if asked is None else asked
        self.usual_microbatches = microbatches or (2 * self.num_stages if self.num_stages > 1 else 1)
        self.num_microbatches = self.replica.num_microbatches or self.usual_microbatches
        before = grid.replicas[: self.replica_index]
        # index of this replica's first microbatch among those of all replicas
        self.first_microbatch = sum(replica.num_microbatches or self.usual_microbatches for replica in before)

    @property
    def all_microbatches(self) -> int:
        """Number of microbatches of a step, over all replicas."""
        return sum(replica.num_microbatches or self.usual_microbatches for replica in self.grid.replicas)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the actions of every device of this process's replica for one step."""
        running = replace(self.replica, stages=self.replica.stages[self.skipped :])
        found = self._choice.of(running, num_microbatches)
        if self.skipped:
            found = tuple(tuple(replace(a, stage=a.stage + self.skipped) for a in actions) for actions in found)
        schedule = with_updates(found, update=False)
        return with_recompute(schedule) if self._checkpointing else schedule

    def count_microbatches(self, num_rows: int, *, short: bool, least: int = 1) -> int:
        """Return the number of microbatches of a batch, reduced so that each has at least `least` rows.

        Raises `UsageError` for a batch with fewer rows than the requested microbatches, unless the batch is `short`:
        the last of an epoch.
        """
        wanted = self.num_microbatches
        if num_rows < wanted and self._asked and not short:
            raise UsageError(
                f"a batch of {counted(num_rows, 'row')} cannot be split into {wanted} microbatches; use at "
                f"least {wanted} rows or fewer microbatches"
            )
        return min(wanted, max(num_rows // least, 1)) if num_rows else 0

    def fixed(self) -> "Arrangement":
        """Return this placement with the number of microbatches fixed; later placements keep the total.

        Rows then fall into the same microbatches for any number of replicas.
        """
        replicas = (
            replace(r, num_microbatches=r.num_microbatches or self.usual_microbatches) for r in self.grid.replicas
        )
        return self.moved(Grid(tuple(replicas)), self.cuts, skipped=self.skipped)

    def moved(self, grid: Grid, cuts: Sequence[Cut], *, skipped: int = 0, rank: int | None = None) -> "Arrangement":
        """Return the placement of the same run on another grid; `rank` is this process's, if its group has changed."""
        return Arrangement(
            self.rank if rank is None else rank,
            grid,
            cuts,
            self._choice,
            checkpointing=self._checkpointing,
            skipped=skipped,
            asked=self._asked,
        )

    def shape(self, num_devices: int) -> Grid:
        """Return a grid with this run's schedule for a number of devices, from `make_grid`.

        The number of replicas is `num_devices` divided by the present number of devices of a replica, rounded down, at
        least 1 and at most the total number of microbatches, which stays the same. Devices left over are spread over
        the replicas, which then have more stages.
        """
        replicas = self.grid.replicas
        total = self.all_microbatches
        each = max(len(set(replica.stages)) for replica in replicas)
        count = max(1, min(num_devices // each, total))
        stages = max(self.num_stages // each, 1) * -(-num_devices // count)
        made = make_grid(range(num_devices), stages, count, self._choice)
        parts = [len(part) for part in shares(total, count)]
        return Grid(tuple(replace(r, num_microbatches=n) for r, n in zip(made.replicas, parts, strict=True)))


def arrange(
    world: World, graph: Graph, cut: CutOptions, options: TrainOptions, common: Callable[[], Cuts]
) -> Arrangement:
    """Choose grid and cuts for a new training run; without names, among the cuts that `common` returns.

    Raises `UsageError`, `CutError` and `PlanError` for invalid options, on every process.
    """
    microbatches = options.microbatches
    if microbatches is not None and microbatches < 1:
        raise UsageError(f"microbatches must be at least 1; got {microbatches}")
    names = cut.names
    if cut.plan is not None:
        grid, names = place_training(world, graph, cut.plan)
        choice = ScheduleChoice(cut.plan.schedule, NUM_BUFFERS)
    else:
        choice = ScheduleChoice(options.schedule, NUM_BUFFERS)
        stages = cut.stages if names is None else cut.count(1)
        grid = make_grid(world.devices, stages, options.replicas, choice)
    if graph.fixed_batch is not None:
        microbatches = microbatches or 1
        check_whole(graph, microbatches, len(grid.replicas))
    first = grid.replicas[0]
    chosen = names is None and len(first.stages) > 1
    cuts = choose_cuts(
        graph,
        common() if chosen else Cuts(graph),
        names=names,
        stages=len(first.stages),
        policy=cut.policy,
        places=[first.devices.index(rank) for rank in first.stages],
    )
    return Arrangement(world.rank, grid, cuts, choice, microbatches=microbatches, checkpointing=options.checkpointing)


def place_training(world: World, graph: Graph, plan: Plan) -> tuple[Grid, list[str]]:
    """Find the processes for a plan's devices, and return the grid and the names of the cuts.

    Raises `PlanError` if the plan is for inference or for another model, or if processes and devices do not match.
    """
    check_purpose(plan, trains=True)
    cuts = cuts_of_plan(graph, plan)
    ranks = ranks_of(world, plan.devices)
    if len(ranks) < len(world.devices):
        raise PlanError(
            f"the plan uses {counted(len(ranks), 'device')}, {', '.join(plan.devices)}, but {len(world.devices)} "
            "processes train; start exactly one process on each of these devices"
        )
    return plan_grid(plan, ranks, {cut.name: cut.position for cut in cuts})


def find_cuts(
    graph: Graph, cut: CutOptions, options: TrainOptions, num_processes: int, common: Callable[[], Cuts]
) -> list[Cut]:
    """Find a model's cuts before its stages are placed, as `arrange`; empty for a plan for inference."""
    if cut.plan is None:
        stages = cut.count(num_processes)
        chosen = cut.names is None and stages > 1
        return choose_cuts(
            graph, common() if chosen else Cuts(graph), names=cut.names, stages=stages, policy=cut.policy
        )
    check_given_once(cut.plan, replicas=options.replicas, microbatches=options.microbatches)
    names = {name for pipeline in cut.plan.pipelines for name in pipeline.cut_sets[0].cuts}
    return cuts_of_plan(graph, cut.plan).find_all(sorted(names)) if cut.plan.trains else []


def check_given_once(plan: Plan | None, **given: object) -> None:
    """Raise `UsageError` for options that the plan already sets."""
    twice = [name for name, value in given.items() if value is not None]
    if plan is not None and twice:
        options = "this option" if len(twice) == 1 else "these options"
        raise UsageError(f"the plan already sets {' and '.join(twice)}; leave {options} out")


def check_profile(graph: Graph, profile: Profile) -> None:
    """Raise `PlanError` if the profile is of another model or has no backward times."""
    if profile.graph != graph_fingerprint(graph):
        raise PlanError(
            f"the profile is of the graph {profile.graph} of {profile.model}, but this model's is "
            f"{graph_fingerprint(graph)}; profile this model in training mode, with --data or --training"
        )
    if any(unit.backward_s is None for unit in profile.units):
        raise PlanError("the profile has no backward seconds; profile with --training or --data")


def common_cuts(captured: Captured) -> Collection[str]:
    """Return the cuts that both the training and the evaluation graph allow."""
    return {cut.name for cut in captured.common_cuts()}


def names_of(cut: Cut) -> tuple[str, ...]:
    """Return all names of a cut."""
    return (cut.name, *cut.aliases)


def plan_training(profile: Profile, cluster: Cluster, placed: Arrangement, *, rows: int, state_factor: float) -> Plan:
    """Return a cluster's fastest plan with the run's current schedule and number of microbatches.

    `rows` are the rows of a microbatch, `state_factor` the bytes of optimizer state per byte of weights. Raises
    `PlanError` if no plan fits.
    """
    return make_plan(
        profile,
        cluster,
        PlanRequest(
            rows=(rows,),
            schedule=placed.schedule_name,
            optimizer_state_factor=state_factor,
            num_microbatches=placed.all_microbatches,
            alternate=False,
        ),
    )


def grid_of_plan(graph: Graph, plan: Plan, ranks: Mapping[str, int]) -> tuple[Grid, list[Cut]]:
    """Place a plan's pipelines on these ranks, given by device; ranks that the plan does not use are idle."""
    cuts = Cuts(graph)
    places = {name: cuts.find(name).position for p in plan.pipelines for name in p.cut_sets[0].cuts}
    grid, names = plan_grid(plan, ranks, places)
    return grid.with_idle(sorted(ranks.values())), cuts.find_all(names)
