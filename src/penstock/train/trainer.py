"""Training over all processes of the user's script: one process, or several as stages, as replicas, or as both."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.deploy.run_options import CutOptions, RunOptions
from penstock.engine.observer import Observer, StageSeconds
from penstock.engine.wiring import go_direct
from penstock.errors import DeviceLost, RunError, TransportError, UsageError, everywhere
from penstock.group.calls import ADVICE, Calls
from penstock.group.world import World
from penstock.runtime.torch_settings import check_no_autocast
from penstock.spec.fields import fingerprint
from penstock.tensors import HOST, most_bytes
from penstock.tracing.trace import write_run
from penstock.train.agreement import check_alike, identity_of
from penstock.train.arrangement import Arrangement, TrainOptions, arrange
from penstock.train.batches import RowCut
from penstock.train.captured import Captured
from penstock.train.features import Follower
from penstock.train.loaded_batch import RecentBatches, StepRows
from penstock.train.loss_convention import LossFunction
from penstock.train.losses import Losses, check_agreed, total_count, total_loss
from penstock.train.optimizers import is_empty
from penstock.train.placed_stages import Computing, PlacedStages
from penstock.train.row_exchange import RowExchange
from penstock.train.step import (
    ForwardBackward,
    LossTensor,
    StepReport,
    TrainingChange,
    check_same,
    check_same_rows,
    check_wanted,
    mean_loss,
)
from penstock.train.training_tracer import TrainingTracer, training_facts
from penstock.transport.collectives import all_gather

if TYPE_CHECKING:
    from penstock.train.survivors import Survivors


class Trainer:
    """One process's trainer in a training run; every process creates one with the same arguments.

    Processes run the same script. Each loads its replica's rows if its stages use inputs or labels; neighbours
    exchange activations and gradients; all ranks receive the loss.

    Example:
        cut, options = CutOptions(stages=2), TrainOptions(schedule="1f1b", microbatches=4)
        trainer = Trainer(Captured(model, (images,)), world, cut, RunOptions(), options)
        loss = trainer.train_step(images, labels, F.cross_entropy)
        trainer.clip_grad_norm_(1.0)

    Raises `UsageError`, `CutError` and `PlanError` for invalid arguments, on every process, and `RunError` or
    `DeviceLost` if a process is lost.
    """

    def __init__(
        self, captured: Captured, world: World, cut: CutOptions, run: RunOptions, options: TrainOptions,
        device: torch.device = HOST, placed: Arrangement | None = None,
    ) -> None:  # fmt: skip
        direct = False
        if device != HOST:
            try:
                direct = go_direct(world, range(world.transport.size), device)
            except TransportError as error:
                world.raise_cause(error)
        self.world = world
        self.device, self.seed = device, options.seed
        self._run = run
        how = Computing(
            device=device,
            direct=direct,
            runtime=run.runtime,
            autocast=options.autocast,
            checkpointing=options.checkpointing,
            stall_s=run.stall_s,
        )
        self.calls = Calls()
        self.step = 0
        # the last step's report, and what its stages' times are added from once they are known
        self._last_step: tuple[StepReport, Observer | None, list[StageSeconds]] = StepReport(), None, []
        self.load_s = 0.0  # seconds spent loading data since the last step
        self.data = RecentBatches()
        self.exchange = RowExchange(self.world)
        self.follower: Follower | None = None  # hook that may change the placement between epochs
        self.survivors: Survivors | None = None  # set if the run survives lost processes
        self.changes: list[TrainingChange] = []  # changes of the process group so far
        self.schedulers: list[Any] = []  # learning-rate schedulers that the caller registered
        self.optimizers: list[torch.optim.Optimizer] = []
        self._num_checked = 0  # number of optimizers that are known to have parameters somewhere
        self.known_groups: list[dict[str, int]] = []  # by optimizer: each parameter's group, also if frozen
        # True if the caller chose the placement
        self.is_arranged = any(each is not None for each in (cut.stages, cut.names, cut.plan, options.replicas))
        self.row_cut = RowCut()
        self.losses = Losses(self.row_cut)
        self._work = ForwardBackward(world, self.losses, self.row_cut, options.seed)
        self._closed = False
        joins = placed is not None
        placed = placed or arrange(world, captured.graph, cut, options, captured.common_cuts)
        run.runtime.check_training(splits_backward=placed.splits_backward)
        self.alike = [
            *identity_of(captured, options, device), [cut.name for cut in placed.cuts], len(placed.grid.replicas),
            placed.usual_microbatches, str(run.runtime), None if cut.plan is None else fingerprint(cut.plan),
        ]  # fmt: skip
        with self.world.explained():
            if not joins:
                check_alike(self.world, self.alike, captured)
            self.now = PlacedStages(self.world, captured, placed, how, self._work.head)
            self.tracer = (
                TrainingTracer(self.world, self.now.observer, self.now.synchronizer, profile=run.trace.profiler)
                if run.trace is not None
                else None
            )
        self._work.tracer = self.tracer
        self.exchange.mark(self.now.placed)

    def follow(self) -> None:
        """Switch to the caller's module as it is now, before an evaluation."""
        self.now.tensors.follow()
        if self.now.captured.follow_evaluation():
            self.now.evaluate_again()

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Run a collective call with the model's current tensors; its name is sent to other processes."""
        health = self.world.health
        if name != "close":
            self.now.tensors.follow()
        with self.calls.entered(name):
            health.call = self.calls.current(numbered=self.survivors is None)
            try:
                yield
            finally:
                health.call = ""

    def together(
        self, work: Callable[[], dict[str, Any]], undo: Callable[[], None] = lambda: None, *, admits: bool = False
    ) -> list[dict[str, Any]]:
        """Run `work` and return the objects of all ranks; raises the error of any rank, or `DeviceLost`.

        If the run survives lost processes, `work` is repeated in another group, so it must contain all its sends and
        receives, and `undo` must revert its changes.
        """

        def marked() -> dict[str, Any]:
            return self.calls.marked(work())

        with self.world.explained():
            if self.survivors is not None:
                documents = self.survivors.together(marked, undo, admits=admits)
            else:
                documents = all_gather(self.world.transport, marked())
            return self.calls.checked(documents, self.world.names)

    def train_step(self, inputs: Any, labels: Any = None, loss_fn: LossFunction | None = None) -> Tensor:
        """Run forward, backward and synchronization of one batch, and return the loss of the whole batch.

        `inputs` and `labels` are this replica's rows. Gradients accumulate.
        """
        self.now.captured.check_unchanged()
        self.now.tensors.check_trained(self.now.captured.trainable)
        check_no_autocast("pass autocast=torch.bfloat16 to the pipeline instead")
        rows = StepRows(self.data, self.exchange, self.now.placed, inputs, labels, [loss_fn])
        rows.number, rows.may_repeat = self.step, self.survivors is not None
        rows.cached = self.data.saw_step(*rows.found)
        if self.survivors is not None:
            rows.check_repeatable()
            self.data.trained = rows.batch
        if (self.survivors is not None or self.follower is not None) and self.step and not self.optimizers:
            raise UsageError(
                "this run may move parameters between processes, so it needs an optimizer of the pipeline; create one "
                "with pipe.optimizer(lambda parameters: ...)"
            )
        tensors, sizes = rows.bound(self.now.captured.graph)
        self.row_cut.check(labels, sizes["batch"])
        check_wanted(self.now, tensors, labels, may_repeat=self.survivors is not None)
        with self.tracer.step(self.step, sizes["batch"]) if self.tracer else contextlib.nullcontext():
            return self._do_step(rows)

    def _do_step(self, rows: StepRows) -> Tensor:
        sent_bytes = self.world.transport.sent_bytes

        def run() -> dict[str, Any]:
            # a process that has just joined learns the step's number only now
            rows.number = self.step
            if self.now.captured.graph.callbacks:
                # hooks and custom functions of the model must see gradients of the batch's mean loss, so losses are
                # scaled first; without any, gradient sums are divided once at the end, so that their bits do not
                # depend on the number of replicas
                rows.scale = 1.0 / max(1, self._count_rows(rows))
            return {**self._work.run(rows, self.now), "empty": self._find_empty()}

        # while losses are exchanged, gradient sums are in flight, or complete if the step may have to be repeated
        gathered = self.together(run, self._work.undo, admits=True)
        divisor = self._work.divisor(gathered)
        with self.world.explained():
            gradients = self._work.gradients(divisor)
        synchronize_s = self.world.clock() - self._work.computed_s
        if self.tracer:
            self.tracer.synchronized(self._work.computed_s)
        step, self.step = self.step, self.step + 1  # counts even if the loss is not finite
        self.exchange.mark(self.now.placed)
        loss = mean_loss(gathered, step, self.now.last_stage)
        if set.intersection(*(set(document["empty"]) for document in gathered)):
            with everywhere():
                raise UsageError("an optimizer has no parameters on any rank; check how its parameters are chosen")
        check_same(gathered, self.world.names)
        self._num_checked = len(self.optimizers)
        if self.follower is not None:
            self.follower.saw_gradients(gradients)
        self.now.tensors.add_gradients(gradients)
        self.now.direct.add(divisor)
        self._work.give_back(divisor)
        self._report(self._work.ran, synchronize_s, self.world.transport.sent_bytes - sent_bytes)
        self.data.short = None
        return torch.tensor(loss, dtype=torch.float64).as_subclass(LossTensor)

    def _find_empty(self) -> list[int]:
        """Return the indices of new optimizers without parameters on this process."""
        return [n for n, each in enumerate(self.optimizers) if n >= self._num_checked and is_empty(each)]

    def _count_rows(self, rows: StepRows) -> int:
        """Return the number of rows of the whole batch, over all replicas."""

        def tell() -> dict[str, Any]:
            rows.load(self.now.placed)
            return {"rows": rows.bound(self.now.captured.graph)[1]["batch"], "replica": self.now.placed.replica_index}

        if len(self.now.placed.grid.replicas) == 1:
            return int(tell()["rows"])
        counts = {document["replica"]: document["rows"] for document in self.together(tell)}
        return sum(counts.values())

    def _report(self, ran: bool, synchronize_s: float, sent_bytes: int) -> None:
        """Update the report of the last step; a replica without rows has run no stage."""
        report = StepReport(
            load_s=self.load_s,
            synchronize_s=synchronize_s,
            sent_bytes=sent_bytes,
            num_synchronizations=self.now.synchronizer.num_buckets,
            synchronized_bytes=self.now.synchronizer.num_bytes,
            peak_memory_bytes=most_bytes(self.device),
        )
        observer = self.now.observer
        self._last_step = report, observer, list(observer.seconds.values()) if ran else []
        self.load_s = 0.0

    @property
    def last_step(self) -> StepReport:
        """Time and traffic of the last step; a GPU finishes the step first."""
        report, observer, seconds = self._last_step
        if observer is not None:
            observer.settle()
        return replace(
            report,
            forward_s=sum(s.forward_s for s in seconds),
            backward_s=sum(s.backward_s for s in seconds),
            wait_s=sum(s.fill_s + s.wait_s + s.send_s for s in seconds),
        )

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Count the time of the block as loading the next step's batch."""
        begin_s = self.world.clock()
        yield
        self.load_s += self.world.clock() - begin_s
        if self.tracer:
            self.tracer.load(self.step, begin_s)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; returns the norm before."""
        # if replicas may be lost, every replica sends its norms, which are the same in each
        tells = self.survivors is not None or self.now.placed.replica_index == 0
        norms: dict[str, float] = {}
        for document in self.together(lambda: {"norms": self.now.tensors.norms() if tells else {}}):
            norms |= document["norms"]
        norm = math.sqrt(math.fsum(norms[name] ** 2 for name in self.now.order if name in norms))
        factor = max_norm / (norm + 1e-6)
        if factor < 1:
            for parameter in self.now.tensors.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return torch.tensor(norm, dtype=torch.float64)

    def optimizer(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Create the optimizer of this process's parameters; `make` receives them and returns an optimizer."""
        self.now.tensors.follow()
        optimizer = self.now.tensors.make_optimizer(make)
        self.optimizers.append(optimizer)
        if self.tracer:
            self.tracer.watch(optimizer)
        return optimizer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of this process's stages by their names in the model."""
        self.now.tensors.follow()
        yield from self.now.tensors.parameters.items()

    def write_trace(self, model: str) -> None:
        """Write the traces of all processes, on rank 0 (a collective call)."""
        if self.tracer is None or self._run.trace is None:
            return
        with self.world.explained():
            traces = self.tracer.gather()
        if traces:
            facts = training_facts(self.world, self.now.placed, model=model, num_steps=self.step)
            write_run(self._run.trace.folder, facts, traces)

    def close(self, *, wait: bool = True) -> None:
        """Release all resources. With `wait`, first wait for every rank (a barrier)."""
        if self._closed:
            return
        self._closed = True
        if self.follower is not None:
            self.follower.close()
        if self.survivors is not None:
            self.survivors.close()
        try:
            if wait and self.world.health.failure is None and self.world.transport.size > 1:
                self.calls.checked(all_gather(self.world.transport, self.calls.marked({})), self.world.names)
        except TransportError:  # ignored, unless a process waits in a different call
            failure = self.world.health.failure
            if failure is not None and ADVICE in failure.message:
                raise RunError(failure.message) from None
        finally:
            self.now.watch.close()
            self.now.close()


def evaluate(trainer: Trainer, inputs: Any, labels: Any, loss_fn: LossFunction | None) -> float:
    """Return the mean of `loss_fn` over all rows of all replicas (a collective call).

    Raises `UsageError` if the count is zero.
    """
    ((total, count),) = evaluate_all(trainer, inputs, labels, [loss_fn])
    if not count:
        raise UsageError("evaluate needs at least one row that counts; got none")
    return total / count


def evaluate_all(
    trainer: Trainer, inputs: Any, labels: Any, functions: Sequence[LossFunction | None]
) -> list[tuple[float, float]]:
    """Return the sum and the count of each function over all rows of all replicas, from a single forward pass."""
    trainer.follow()
    rows = StepRows(trainer.data, trainer.exchange, trainer.now.placed, inputs, labels, functions)
    trainer.row_cut.check(labels, rows.bound(trainer.now.evaluation.graph)[1]["batch"])

    def work() -> dict[str, Any]:
        evaluation, only_replica = trainer.now.evaluation, len(trainer.now.placed.grid.replicas) == 1
        given = rows.now(trainer.now.placed, evaluation.parts, evaluation.graph)
        measures = evaluation.measures(given, functions, trainer.losses, trainer.row_cut, only_replica=only_replica)
        return {"measures": measures, "problem": given.problem}

    gathered = trainer.together(work)
    trainer.exchange.mark(trainer.now.placed)
    check_same_rows(gathered)
    found = []
    for index in range(len(functions)):
        documents = [document["measures"][index] for document in gathered]
        check_agreed(documents)
        found.append((total_loss(documents), total_count(documents)))
    return found


def predict(trainer: Trainer, inputs: Any) -> Any:
    """Return the model's output for this replica's rows, on every process of the replica.

    Raises `DeviceLost` if a process is lost during the call, because the rows are then redistributed.
    """
    trainer.follow()
    placed = trainer.now.placed
    rows = StepRows(trainer.data, trainer.exchange, placed, inputs, None)
    found: list[Any] = []

    def work() -> dict[str, Any]:
        if trainer.now.placed is not placed:
            raise DeviceLost("a device was lost, and these rows were redistributed; request predictions again")
        evaluation = trainer.now.evaluation
        found[:] = [evaluation.outputs(rows.now(placed, evaluation.parts, evaluation.graph))]
        return {}

    if trainer.survivors is not None:
        trainer.together(work)
    else:
        with trainer.world.explained():
            work()
    trainer.exchange.mark(placed)
    return found[0]
