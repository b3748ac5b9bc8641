"""Forward and backward of one process's rows of a batch, and gradient sums over all replicas."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.engine.executor import run_schedule
from penstock.engine.stages import MicrobatchRows
from penstock.graph.rows import check_rows
from penstock.group.world import World
from penstock.train.batches import WHOLE, RowCut, cut_rows
from penstock.train.input_gradients import give_back, with_leaves
from penstock.train.loaded_batch import StepRows
from penstock.train.loss_convention import MeasuredLoss
from penstock.train.losses import Losses, is_undivided, total_count
from penstock.train.outcome import step_document
from penstock.train.placed_stages import PlacedStages
from penstock.train.training_tracer import TrainingTracer


class ForwardBackward:
    """The computation of a step on the current stages; repeated if a process is lost during it.

    Example:
        told = trainer.together(lambda: work.run(rows, trainer.now), work.undo)
        gradients = work.gradients(work.divisor(told))
    """

    def __init__(self, world: World, losses: Losses, row_cut: RowCut, seed: int) -> None:
        self._world, self._all_losses, self._row_cut, self._seed = world, losses, row_cut, seed
        self.tracer: TrainingTracer | None = None
        self._step: StepRows  # of the last `run`; `_now` are the stages that it ran on
        self._now: PlacedStages
        # gradient sums, if they must be complete before the processes exchange their documents (losses, counts, errors)
        self._sums: dict[str, Tensor] = {}
        self.computed_s = 0.0
        self._wanted: list[str] = []  # inputs that require a gradient
        self._losses: dict[int, MeasuredLoss] = {}
        self._microbatches: list[MicrobatchRows] = []
        self._problem = ""  # reason why this step's rows cannot be trained on
        self._before: list[tuple[Tensor, Tensor]] = []  # buffers that a forward writes to, with their earlier values

    def divisor(self, gathered: Sequence[Mapping[str, Any]]) -> float:
        """Return the divisor of the gradient sums, from the documents of all processes."""
        undivided = any(is_undivided(document["kinds"]) for document in gathered)
        return (total_count(gathered) or 1.0) * (1.0 if undivided else self._step.scale)

    @property
    def ran(self) -> bool:
        """True if this process had rows."""
        return bool(self._microbatches)

    def head(self, index: int, microbatch: MicrobatchRows, outputs: Sequence[Tensor]) -> Tensor:
        """Return a microbatch's loss, summed over its rows or counted labels and scaled, from the last stage's outputs.

        The loss and its count are recorded for `divisor`.
        """
        now, step = self._now, self._step
        alone = len(self._microbatches) == 1 and len(now.placed.grid.replicas) == 1
        measured = self._all_losses.measure(
            step.functions[0], now.captured.graph, outputs, microbatch, own=now.own_loss, alone=alone
        )
        self._losses[index] = dataclasses.replace(measured, total=measured.total.detach())
        return measured.total if step.scale == 1.0 or is_undivided([measured.kind]) else measured.total * step.scale

    def run(self, step: StepRows, now: PlacedStages) -> dict[str, Any]:
        """Run forward and backward on this process's rows; returns the document for the other ranks."""
        self._step, self._now = step, now
        if not step.may_repeat:
            return self._forward_backward()
        self._before = [(tensor, tensor.clone()) for tensor in now.tensors.written().values()]
        document = self._forward_backward()
        self._sums = self._finish_sums()
        now.tensors.share_buffers(self._world.transport)
        return document

    def undo(self) -> None:
        """Restore the buffers that a forward has written to, such as BatchNorm statistics."""
        for tensor, was in self._before:
            tensor.copy_(was)
        self._before = []

    def gradients(self, divisor: float) -> dict[str, Tensor]:
        """Return the gradient sums over all replicas, divided by `divisor`, and release the sums kept here.

        Also sends the first replica's buffers to the other replicas, unless `run` did.
        """
        if self._step.may_repeat:
            sums, self._sums, self._before = self._sums, {}, []
            return {name: gradient.div_(divisor) for name, gradient in sums.items()}
        sums = self._finish_sums(divisor)
        self._now.tensors.share_buffers(self._world.transport)
        return sums

    def give_back(self, divisor: float) -> None:
        """Run the caller's graph backward from inputs that require a gradient."""
        if self._wanted:
            inputs, _ = self._step.bound(self._now.captured.graph)
            give_back(self._now, inputs, self._wanted, self._microbatches, divisor, self._world.transport)

    def _finish_sums(self, divisor: float = 1.0) -> dict[str, Tensor]:
        """Wait for the gradient sums over all replicas, and return them divided."""
        with self._world.transport.waiting():
            return self._now.synchronizer.finish(divisor)

    def _forward_backward(self) -> dict[str, Any]:
        rows, now = self._step, self._now
        given = rows.now(now.placed, now.parts, now.captured.graph)
        sizes, self._problem = given.sizes, given.problem
        short = rows.is_short(sizes["batch"])
        count = now.placed.count_microbatches(sizes["batch"], short=short, least=now.captured.least_rows)
        if count > 1 or len(now.placed.grid.replicas) > 1:
            check_rows(now.captured.graph, sizes, WHOLE, trains=True)
        skipped = 0 if self._computes_all() else now.placed.skipped
        self._wanted = [name for name, tensor in given.tensors.items() if tensor.requires_grad]
        tensors = {name: x.detach() if name in self._wanted else x for name, x in given.tensors.items()}
        tensors, labels = now.tensors.moved_here(tensors, given.labels, skipped=skipped)
        microbatches = cut_rows(now.captured.graph, tensors, sizes, labels, count, self._row_cut) if count else []
        key, first = f"seed {self._seed} step {rows.number} microbatch", now.placed.first_microbatch
        self._microbatches = [
            dataclasses.replace(m, rng_key=f"{key} {number}") for number, m in enumerate(microbatches, first)
        ]
        if self._wanted:
            self._microbatches = with_leaves(self._microbatches, self._wanted)
        self._losses.clear()
        now.synchronizer.begin()
        features = self._features()
        if count:
            self._run_stages(count, features)
        self.computed_s = self._world.clock()
        now.synchronizer.flush()
        return self._document()

    def _computes_all(self) -> bool:
        """Return whether this step also computes the skipped stages, because no cached outputs belong to its rows."""
        now = self._now
        return now.placed.skipped > 0 and (now.features is None or self._step.cached is None)

    def _features(self) -> list[Tensor] | None:
        """Return the cached outputs of the skipped stages for this process's rows."""
        features, cached = self._now.features, self._step.cached
        if features is None or cached is None:
            return None
        with self._world.transport.waiting():
            return features.outputs(cached.samples, cached.following)

    def _run_stages(self, count: int, features: list[Tensor] | None) -> None:
        now, tracer = self._now, self.tracer
        if now.open_channels(self._microbatches) and tracer:
            tracer.follow(now.channels)
        actions = now.placed.schedule(count)[now.placed.replica.devices.index(self._world.rank)]
        backwards = {action.stage: action for action in actions if action.kind in {"B", "W"}}  # the last of each stage
        final = {stage: action.microbatch for stage, action in backwards.items() if action.kind == "B"}
        for stage in now.stages.values():
            stage.begin(self._microbatches, final.get(stage.index, -1))
        now.feed(self._microbatches, features)
        now.observer.begin()
        try:
            run_schedule(actions, now.stages, now.channels, now.observer)
        finally:
            now.direct.collect(now.last_stage)

    def _document(self) -> dict[str, Any]:
        """Return this process's document about the step."""
        now = self._now
        # the first step determines which parameters contribute to the loss
        names = self._step.number == 0 and bool(self._microbatches)
        unused = now.synchronizer.unused if names else []
        used = [name for name in now.tensors.parameters if name not in unused] if names else []
        # whoever has finite losses does not ask its stages, since a GPU answers after all that is queued on it
        finite = bool(self._losses) and all(math.isfinite(each.number) for each in self._losses.values())
        nonfinite = [] if finite else [stage.index for stage in now.stages.values() if not stage.is_finite]
        document = step_document(self._losses, nonfinite=nonfinite, used=used, unused=unused, problem=self._problem)
        return {**document, "wanted": self._wanted}
