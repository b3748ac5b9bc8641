"""Elastic training: freezing, replanning, migration and caching between epochs."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from penstock.elastic.costs import PlannerInputs, arrangement_of, find_costs, near, plan_of, same_places
from penstock.elastic.decide import Caching, Decision, LayerNorms, Situation, decide, layer_of
from penstock.elastic.epochs import EpochRecord, FreezePolicy, next_frozen
from penstock.elastic.freezing import ByHand, Delayed, Guarded, Never
from penstock.elastic.options import ElasticOptions
from penstock.errors import UsageError, exclude
from penstock.plan.cost.training_step import ADAMW_STATE
from penstock.plan.schedule.schedules import SCHEDULES
from penstock.runtime.registry import EAGER
from penstock.spec.plan import Plan, decode_plan, encode_plan
from penstock.terminal.progress import working
from penstock.train.captured import Captured
from penstock.train.loader import Loader
from penstock.train.migration import fix_microbatches, migrate
from penstock.train.named_optimizer import NamedOptimizer
from penstock.train.trainer import Trainer
from penstock.transport.collectives import all_gather
from penstock.wire import FEEDER


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """Placement from an epoch on: frozen layers, stages, replicas, whether a cache is read; and the change's cost."""

    step: int
    epoch: int
    frozen_layers: int
    num_layers: int
    stages: int
    replicas: int
    cached: bool
    migrate_s: float
    moved_bytes: int
    fill_s: float
    why: str


class ElasticTraining:
    """Replanning of a training run between epochs; plans do not affect the trained weights.

    At the beginning of each epoch the policy returns the number of leading layers to freeze. The planner chooses
    stages, replicas and the cache for the remaining epochs; tensors then migrate. Created by
    `TrainingPipeline.elastic`, on every process.

        epoch ends ─▶ policy ─▶ decide ─▶ fill the cache ─▶ migrate ─▶ next epoch

    Raises `UsageError` if the placement cannot change, because the run is traced, survives lost processes or has a
    custom schedule, and if the layers to freeze cannot be frozen, for example because they share a weight with another.
    """

    def __init__(
        self,
        trainer: Trainer,
        loader: Loader,
        options: ElasticOptions,
        told: Callable[[PlanChange], None] | None = None,
    ) -> None:
        exclude("the trace", trainer.tracer is not None, "a trace needs one plan, and elastic training changes it")
        survives, runtime = trainer.survivors is not None, trainer.now.how.runtime
        exclude("on_loss or elastic", survives, "an elastic training cannot survive lost processes yet")
        exclude("runtime", runtime != EAGER, f"elastic training needs the runtime eager; got {runtime}")
        if trainer.now.placed.schedule_name not in SCHEDULES:
            raise UsageError(
                "an elastic training needs a named schedule, because a custom one cannot be adapted to other numbers "
                "of stages; name one"
            )
        self._trainer, self._loader, self._options = trainer, loader, options
        self._policy, self._told = options.policy(), told
        self._whole: Captured = trainer.now.captured  # the whole model, with no layer frozen
        self._captured: dict[int, Captured] = {}
        self._num_layers = self._count_layers()
        self._norms = LayerNorms(layer_of(self._whole.graph, self._whole.layers), self._num_layers)
        self.history: list[EpochRecord] = []
        self.changes: list[PlanChange] = []
        self._caching = Caching(trainer, self._whole, loader, options)
        self._costs: PlannerInputs | None = None
        self._plan: Plan | None = None  # set on rank 0 only
        self._started = self._over = False
        self._decided: int | None = None  # epoch of the last decision
        self._begun: int | None = None  # epoch that has begun but is not in the history yet
        self._migrate_s = 0.0
        self._moves_measured = False
        self._running: tuple[float, int] | None = None  # start time of this epoch, and the rows done by then
        self._beside_s = 0.0  # seconds per row of the last epoch beyond the prediction
        trainer.follower = loader.follower = self

    @property
    def frozen_layers(self) -> int:
        """Number of leading layers that are currently frozen."""
        return self._trainer.now.captured.frozen_layers

    def _count_layers(self) -> int:
        """Return how many leading layers can be frozen while some parameters still train.

        With a list of counts, or with the policy `none`, this is the number of all layers. Raises `UsageError` if no
        layer can be frozen, or not as many as the list asks for.
        """
        count = len(self._whole.layers)
        policy = _innermost(self._policy)
        if isinstance(policy, ByHand):
            for layers in set(policy.layers):  # fail now rather than after some epochs
                self._frozen(layers)
        if isinstance(policy, ByHand | Never):
            return count
        self._frozen(1)  # raises an error for shared weights
        while count > 1 and not self._trains(count):
            count -= 1
        return count

    def _trains(self, frozen: int) -> bool:
        try:
            self._frozen(frozen)
        except UsageError:
            return False
        return True

    def validated(self, *, loss: float | None = None, accuracy: float | None = None) -> None:
        """Record the validation results of the epoch that has just ended, for policies that use them.

        Every process calls this. Calls within an epoch are ignored.
        """
        if self._loader.position:
            return
        self._end_begun()
        if self.history:
            self.history[-1] = msgspec.structs.replace(self.history[-1], loss=loss, accuracy=accuracy)

    def saw_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the squared gradients of a step to the epoch's sums."""
        if self._trainer.now.placed.replica_index == 0:  # replicas have the same gradients
            counted = self._trainer.now.tensors.counted_here
            self._norms.add({name: gradient for name, gradient in gradients.items() if name in counted})

    def end_epoch(self, loader: Loader) -> None:
        """Record the epoch's gradient norms."""
        if self._begun is None:
            return
        self._look_at_time()
        squares = self._squares()
        self._norms.take()
        self._begun = None
        self.history.append(
            EpochRecord(
                epoch=loader.epoch - 1,
                frozen_layers=self.frozen_layers,
                gradient_norms=tuple(math.sqrt(square) for square in squares),
            )
        )

    def _end_begun(self) -> None:
        """Record the begun epoch if all its batches are done and nobody called `end_epoch`.

        That is so if the loop left its iteration right after the epoch's last batch, or if the run was resumed from a
        checkpoint written before the end of the epoch was recorded.
        """
        if self._begun is not None and self._begun < self._loader.epoch:
            self.end_epoch(self._loader)

    def _squares(self) -> list[float]:
        with self._trainer.world.explained():
            gathered = all_gather(self._trainer.world.transport, {"squares": self._norms.squares()})
        return [math.fsum(document["squares"][layer] for document in gathered) for layer in range(self._num_layers)]

    def begin_epoch(self, loader: Loader) -> None:
        """Decide on the plan for the epoch, and migrate to it."""
        if self._decided == loader.epoch:
            return
        self._decided = loader.epoch
        first = not self._started
        self._end_begun()
        self._begun = loader.epoch
        with self._trainer.world.explained():
            if first:
                self._start()
            if loader.position == 0:
                frozen = next_frozen(self._policy, self.history, self._num_layers)
            else:
                frozen = self.frozen_layers  # resumed from a checkpoint within the epoch
            self._go_on(frozen, first=first)
        self._running = time.monotonic(), loader.position * loader.batch_size

    def _look_at_time(self) -> None:
        """Compare the epoch's time with its plan's prediction."""
        if self._plan is not None and self._running is not None:
            since_s, done = self._running
            rows = max(1, self._loader.num_samples - done)
            self._beside_s = max(0.0, (time.monotonic() - since_s) / rows - 1.0 / self._plan.prediction.rows_per_s)
        self._running = None

    def _start(self) -> None:
        """Measure the run's costs, and make its number of microbatches constant."""
        trainer = self._trainer
        self._started = True
        fix_microbatches(trainer)
        self._costs = find_costs(trainer, self._whole, self._options, self._rows())
        self._caching.look()

    def _rows(self) -> int:
        """Return the rows per microbatch of a full batch."""
        return max(1, self._loader.batch_size // self._trainer.now.placed.all_microbatches)

    def _go_on(self, frozen: int, *, first: bool) -> None:
        """Decide on the placement with `frozen` layers frozen, fill a cache if that pays off, and migrate to it."""
        before, before_cached = self.frozen_layers, self._caching.layers
        captured = self._frozen(frozen)  # before any decision: raises on every process if layers cannot be frozen
        document = self._decision(frozen, first=first)
        cached = document["cached_layers"]
        fill_s = 0.0
        if cached and cached != before_cached:
            begin = time.monotonic()
            if not self._caching.fill(self._frozen(cached)):
                document = self._decision(frozen, first=first)  # again, as the cache could not be filled
                cached = document["cached_layers"]
            fill_s = time.monotonic() - begin
        self._plan = plan = decode_plan(document["plan"].encode())
        if frozen == before and cached == before_cached and not document["moves"]:
            self._caching.begin_epoch()
            self._tell(document, migrate_s=0.0, moved_bytes=0, fill_s=fill_s)
            return
        if not cached:
            self._caching.drop()
        if self._costs is not None:  # identical devices may have exchanged their places in the plan
            self._costs = dataclasses.replace(self._costs, ranks=document["ranks"])
        placed = arrangement_of(self._trainer.now.placed, captured, plan, document["ranks"], cached_layers=cached)
        moved = migrate(self._trainer, placed, captured, self._caching.features(placed))
        if moved.moved_bytes:
            self._migrate_s, self._moves_measured = moved.seconds, True
        self._tell(document, migrate_s=moved.seconds, moved_bytes=moved.moved_bytes, fill_s=fill_s)

    def _frozen(self, layers: int) -> Captured:
        if layers not in self._captured:
            self._captured[layers] = self._whole.frozen(layers)
        return self._captured[layers]

    def _decision(self, frozen: int, *, first: bool) -> dict[str, Any]:
        """Make the decision on the driver, and return it on every process."""
        trainer, costs = self._trainer, self._costs
        mine: dict[str, Any] = {}
        state_factor = self._state_factor()
        if trainer.world.rank == FEEDER and costs is not None:
            plan = self._plan or plan_of(
                trainer.now.placed, costs, self._whole, rows=self._rows(), state_factor=state_factor
            )
            with working(f"planning for {len(costs.cluster.devices)} devices"):
                decided = self._decide(costs, plan, frozen, first=first)
            ranks = near(
                trainer,
                self._frozen(frozen),
                decided.plan,
                costs,
                cached_layers=decided.cached_layers,
                state_factor=state_factor,
            )
            mine = {
                "plan": encode_plan(decided.plan).decode(),
                "cached_layers": decided.cached_layers,
                "why": decided.why,
                "moves": decided.moves,
                "ranks": ranks,
            }
        found: dict[str, Any] = all_gather(trainer.world.transport, mine)[FEEDER]
        return found

    def _decide(self, costs: PlannerInputs, plan: Plan, frozen: int, *, first: bool) -> Decision:
        options, trainer = self._options, self._trainer
        epochs = (options.epochs or self._loader.epoch + 1) - self._loader.epoch
        done = self._loader.position * self._loader.batch_size
        remaining = max(1.0, float(epochs * self._loader.num_samples - done))
        # keep the caller's placement in the first epoch, unless a layer is already frozen
        pack = options.pack and not (first and trainer.is_arranged and not frozen)
        return decide(Situation(
            profile=costs.profile, cluster=costs.cluster, plan=plan,
            layers=[cut.name for cut in self._whole.layers], frozen_layers=frozen,
            cached_layers=self._caching.layers, remaining_rows=remaining,
            migrate_s=self._cost_of_moving(costs, plan), pack=pack, replicate=options.replicate,
            caching=self._caching.costs(costs.profile) if frozen else None, beside_s=self._beside_s,
        ))  # fmt: skip

    def _cost_of_moving(self, costs: PlannerInputs, plan: Plan) -> float:
        """Return the seconds of the last migration that moved bytes.

        Before there is one, estimate the seconds to send all weights and optimizer state over the slowest link.
        """
        if self._moves_measured:
            return self._migrate_s
        rates = [d.bandwidth_bytes_per_s for d in costs.cluster.devices if d.bandwidth_bytes_per_s]
        weights = sum(dict(pair for unit in costs.profile.units for pair in unit.parameters).values())
        return weights * (1 + plan.optimizer_state_factor) / min(rates) if rates else 0.0

    def _state_factor(self) -> float:
        """Return the elements of optimizer state per element of trained weights, over all processes."""
        weights = state = 0
        for optimizer in self._trainer.optimizers:
            for name, slots in NamedOptimizer(self._trainer.now.tensors, optimizer).slots().items():
                size = self._trainer.now.tensors.parameters[name].numel()
                weights += size
                state += sum(size for slot in slots.values() if isinstance(slot, Tensor) and slot.numel() == size)
        gathered = all_gather(self._trainer.world.transport, {"weights": weights, "state": state})
        total, kept = (sum(document[key] for document in gathered) for key in ("weights", "state"))
        # before its first step an optimizer has no state; assume AdamW's, which few optimizers exceed
        return kept / total if kept else ADAMW_STATE

    def _tell(self, document: Mapping[str, Any], *, migrate_s: float, moved_bytes: int, fill_s: float) -> None:
        trainer = self._trainer
        placed = trainer.now.placed
        stages = max(len(set(r.stages[placed.skipped :])) for r in placed.grid.replicas)
        change = PlanChange(
            step=trainer.step,
            epoch=self._loader.epoch,
            frozen_layers=self.frozen_layers,
            num_layers=self._num_layers,
            stages=stages,
            replicas=len(placed.grid.replicas),
            cached=placed.skipped > 0,
            migrate_s=migrate_s,
            moved_bytes=moved_bytes,
            fill_s=fill_s,
            why=document["why"],
        )
        self.changes.append(change)
        if self._told is not None:
            self._told(change)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, the same on every process."""
        return {
            "frozen_layers": self.frozen_layers,
            "squares": self._squares(),
            "history": [msgspec.to_builtins(record) for record in self.history],
            "begun": self._begun,
            "groups": self._trainer.known_groups,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Freeze a checkpoint's frozen layers in the current placement; the loop's next epoch begins with a replan."""
        self._begun, self._decided, self._plan, self._running = state["begun"], None, None, None
        self.history = msgspec.convert(state["history"], list[EpochRecord])
        captured = self._frozen(int(state["frozen_layers"]))
        self._norms.take()
        if self._trainer.world.rank == FEEDER:
            self._norms.put(state["squares"])
        trainer = self._trainer
        fix_microbatches(trainer)
        if captured.frozen_layers != self.frozen_layers or trainer.now.placed.skipped:
            migrate(trainer, same_places(trainer, captured), captured)
        self._caching.drop()  # the cache may be of a later epoch than the checkpoint
        trainer.known_groups[:] = [dict(groups) for groups in state["groups"]]

    def close(self) -> None:
        """Release the cache."""
        if self._over:
            return
        self._over = True
        self._caching.drop()


def _innermost(policy: FreezePolicy) -> FreezePolicy:
    """Return the policy inside delays and guards."""
    while isinstance(policy, Guarded | Delayed):
        policy = policy.policy
    return policy
