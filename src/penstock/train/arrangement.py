"""Which process holds which stage in a training, how its batches are cut, and in which order it works."""

from penstock.deploy.options import CutOptions
from penstock.deploy.placing import ranks_of
from penstock.deploy.policies import choose_cuts
from penstock.deploy.programs import cuts_of_plan
from penstock.engine.placement import Grid, Replica
from penstock.engine.wiring import DEPTH
from penstock.errors import PlanError, UsageError
from penstock.graph.cuts import Cut, Cuts
from penstock.graph.graph import Graph
from penstock.group.world import World
from penstock.plan.schedule.actions import Schedule
from penstock.plan.schedule.schedules import with_recompute, with_updates
from penstock.spec.check import check_purpose
from penstock.spec.plan import Plan
from penstock.train.grids import ScheduleChoice, make_grid, plan_grid
from penstock.train.options import TrainOptions


class Arrangement:
    """A training put in place, as one process sees it: all processes, and the replica that it is of.

    Raises `UsageError`, `CutError` and `PlanError` for what cannot be, on every process alike.
    """

    def __init__(self, world: World, graph: Graph, cut: CutOptions, options: TrainOptions) -> None:
        microbatches = options.microbatches
        if microbatches is not None and microbatches < 1:
            raise UsageError(f"a step needs at least one microbatch, not {microbatches}")
        names = cut.cuts
        if cut.plan is not None:
            self.grid, names = place_training(world, graph, cut.plan)
            self._choice = ScheduleChoice(cut.plan.schedule, 2 * DEPTH)
        else:
            self._choice = ScheduleChoice(options.schedule, 2 * DEPTH)
            stages = cut.stages if names is None else len(names) + 1
            self.grid = make_grid(world.devices, stages, options.replicas, self._choice)
        first = self.grid.replicas[0]
        self.num_stages = len(first.stages)
        self.cuts: list[Cut] = choose_cuts(
            graph, Cuts(graph), names=names, stages=self.num_stages, policy=cut.policy,
            places=[first.devices.index(rank) for rank in first.stages],
        )  # fmt: skip
        self.replica_index = self.grid.replica_of(world.rank)
        self.replica: Replica = self.grid.replicas[self.replica_index]
        self._checkpointing = options.checkpointing
        self._given_microbatches = microbatches or self.replica.num_microbatches
        self.usual_microbatches = microbatches or (2 * self.num_stages if self.num_stages > 1 else 1)
        self.num_microbatches = self.replica.num_microbatches or self.usual_microbatches
        before = self.grid.replicas[: self.replica_index]
        # of all replicas' microbatches the number of this replica's first one
        self.first_microbatch = sum(replica.num_microbatches or self.usual_microbatches for replica in before)

    @property
    def schedule_name(self) -> str:
        """The schedule's name, or its text where it is the user's own."""
        return self._choice.name

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the actions of every device of this process's replica for one step."""
        schedule = with_updates(self._choice.of(self.replica, num_microbatches), update=False)
        return with_recompute(schedule) if self._checkpointing else schedule

    def count_microbatches(self, num_rows: int, *, short: bool) -> int:
        """Return how many microbatches a batch is cut into; a `short` one, at the end of the data, into fewer.

        Raises `UsageError` for another batch with fewer rows than the microbatches that were asked for.
        """
        wanted = self.num_microbatches
        if num_rows >= wanted:
            return wanted
        if self._given_microbatches is not None and not short:
            raise UsageError(
                f"a batch of {num_rows} rows cannot be {wanted} microbatches; give at least {wanted} rows, or fewer "
                "microbatches"
            )
        return num_rows


def place_training(world: World, graph: Graph, plan: Plan) -> tuple[Grid, list[str]]:
    """Find the processes for a plan's devices, and return the grid and the names of the cuts.

    Raises `PlanError` for a plan for inference or of another model, and where processes and devices do not agree.
    """
    check_purpose(plan, trains=True)
    cuts = cuts_of_plan(graph, plan)
    ranks = ranks_of(world, plan.devices)
    if len(ranks) < len(world.devices):
        raise PlanError(
            f"the plan uses {len(ranks)} devices, {', '.join(plan.devices)}, but {len(world.devices)} processes train; "
            "start one on each of them"
        )
    return plan_grid(plan, ranks, {cut.name: cut.position for cut in cuts})


def find_cuts(graph: Graph, cut: CutOptions, options: TrainOptions, num_processes: int) -> list[Cut]:
    """Find where a model is cut before its stages have a place; a plan for inference says nothing of training."""
    if cut.plan is None:
        stages = cut.stages or num_processes
        return choose_cuts(graph, Cuts(graph), names=cut.cuts, stages=stages, policy=cut.policy)
    check_given_once(
        cut.plan, stages=cut.stages, cuts=cut.cuts, replicas=options.replicas, microbatches=options.microbatches
    )
    names = {name for pipeline in cut.plan.pipelines for name in pipeline.cut_sets[0].cuts}
    return cuts_of_plan(graph, cut.plan).find_all(sorted(names)) if cut.plan.trains else []


def check_given_once(plan: Plan | None, **given: object) -> None:
    """Raise `UsageError` where what a plan says is given beside it."""
    twice = [name for name, value in given.items() if value is not None]
    if plan is not None and twice:
        raise UsageError(f"a plan says its {' and '.join(twice)}; leave {'it' if len(twice) == 1 else 'them'} out")
