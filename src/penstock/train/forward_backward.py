"""Forward and backward of one process's rows of a batch, and gradient sums over all replicas."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.engine.executor import run_schedule
from penstock.engine.training_stage import Sizes, StepInput
from penstock.graph.rows import check_rows
from penstock.graph.training_parts import TrainingPart
from penstock.train.batches import WHOLE, Microbatch, cut_rows
from penstock.train.features import LoadedBatch
from penstock.train.loss_convention import LossFunction, Measured
from penstock.train.losses import is_undivided, total_count
from penstock.train.outcome import step_document
from penstock.train.step_rows import StepRows

if TYPE_CHECKING:
    from penstock.train.trainer import Trainer


class ForwardBackward:
    """The computation of a trainer's step on the current stages; repeated if a process is lost during it.

    Example:
        work.begin(loss_fn, cached=None)
        told = trainer.together(lambda: work.run(rows), work.undo)
        gradients = work.gradients(divisor)
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._sums: dict[str, Tensor] = {}  # of gradients, if they must be complete before the exchange of documents
        self.computed_s = 0.0
        self._losses: dict[int, Measured] = {}
        self._microbatches: list[Microbatch] = []
        self._loss_fn: LossFunction | None = None
        self._cached: LoadedBatch | None = None
        self._before: list[tuple[Tensor, Tensor]] = []  # buffers that a forward writes to, with their previous values
        self._scale = 1.0

    def begin(self, loss_fn: LossFunction | None, cached: LoadedBatch | None) -> None:
        """Begin a step with its loss function, and the batch whose features may be cached."""
        self._loss_fn, self._cached = loss_fn, cached

    def scale_by(self, num_rows: int) -> None:
        """Divide losses by the rows of the whole batch before the backward, instead of sums by their count after it.

        So hooks and custom functions of the model see the gradient of a mean over the batch. Otherwise sums are added
        up and divided once, whose bits do not depend on the number of replicas.
        """
        self._scale = 1.0 / max(1, num_rows)

    def divisor(self, gathered: Sequence[Mapping[str, Any]]) -> float:
        """Return the divisor of the gradient sums, from the documents of all processes."""
        undivided = any(is_undivided(document["kinds"]) for document in gathered)
        return (total_count(gathered) or 1.0) * (1.0 if undivided else self._scale)

    @property
    def ran(self) -> bool:
        """True if this process had rows."""
        return bool(self._microbatches)

    def head(self, microbatch: int, outputs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Return a microbatch's loss as a sum, from the last stage's outputs; record it with its count."""
        now, labels = self._trainer.now, self._microbatches[microbatch].labels
        alone = len(self._microbatches) == 1 and len(now.placed.grid.replicas) == 1
        measured = self._trainer.losses.measure(
            self._loss_fn, now.captured.graph, outputs, sizes, labels, own=now.own_loss, alone=alone
        )
        self._losses[microbatch] = dataclasses.replace(measured, total=measured.total.detach())
        return measured.total if self._scale == 1.0 or is_undivided([measured.kind]) else measured.total * self._scale

    def run(self, rows: StepRows) -> dict[str, Any]:
        """Run forward and backward of this process's rows; returns the document for the other ranks."""
        trainer = self._trainer
        if trainer.survivors is None:
            return self._forward_backward(rows)
        self._before = [(tensor, tensor.clone()) for tensor in trainer.tensors.written().values()]
        document = self._forward_backward(rows)
        self._sums = self._finish_sums()
        trainer.tensors.share_buffers(trainer.transport)
        return document

    def undo(self) -> None:
        """Restore buffers that a forward has written to, such as BatchNorm's statistics."""
        for tensor, was in self._before:
            tensor.copy_(was)
        self._before = []

    def gradients(self, divisor: float) -> dict[str, Tensor]:
        """Return the gradient sums over all replicas, divided, after sharing buffers; releases the sums kept here."""
        trainer = self._trainer
        if trainer.survivors is not None:
            sums, self._sums, self._before = self._sums, {}, []
            return {name: gradient.div_(divisor) for name, gradient in sums.items()}
        sums = self._finish_sums(divisor)
        trainer.tensors.share_buffers(trainer.transport)
        return sums

    def _finish_sums(self, divisor: float = 1.0) -> dict[str, Tensor]:
        """Wait for the gradient sums over all replicas, divided."""
        with self._trainer.transport.waiting():
            return self._trainer.now.synchronizer.finish(divisor)

    def _forward_backward(self, rows: StepRows) -> dict[str, Any]:
        trainer, now = self._trainer, self._trainer.now
        _, labels = rows.now()
        tensors, sizes = rows.bound()
        short = sizes["batch"] == trainer.short_batch
        count = now.placed.count_microbatches(sizes["batch"], short=short, least=now.captured.least_rows)
        if count > 1 or len(now.placed.grid.replicas) > 1:
            check_rows(now.captured.graph, sizes, WHOLE, trains=True)
        skipped = 0 if self._computes_all() else now.placed.skipped
        tensors, labels = now.tensors.moved_here(tensors, labels, skipped=skipped)
        self._microbatches = (
            cut_rows(now.captured.graph, tensors, sizes, labels, count, trainer.row_cut) if count else []
        )
        self._losses.clear()
        now.synchronizer.begin()
        features = self._features()
        if count:
            self._run_stages(count, features)
        self.computed_s = trainer.world.clock()
        now.synchronizer.flush()
        return self._document()

    def _computes_all(self) -> bool:
        """Return whether this step computes the skipped stages too: its rows are not from a loader."""
        now = self._trainer.now
        return now.placed.skipped > 0 and (now.features is None or self._cached is None)

    def _features(self) -> list[Tensor] | None:
        """Return the cached outputs of the skipped stages for this process's rows."""
        features = self._trainer.now.features
        if features is None or self._cached is None:
            return None
        with self._trainer.transport.waiting():
            return features.outputs(self._cached.samples, self._cached.following)

    def _run_stages(self, count: int, features: list[Tensor] | None) -> None:
        trainer, now = self._trainer, self._trainer.now
        if now.open_channels(self._microbatches) and trainer.tracer:
            trainer.tracer.follow(now.channels)
        actions = now.placed.schedule(count)[now.placed.replica.devices.index(trainer.world.rank)]
        final = {action.stage: action.microbatch for action in actions if action.kind == "B"}
        for stage in now.stages.values():
            stage.begin(self._inputs(stage.part), final.get(stage.index, -1))
        now.feed(self._microbatches, features)
        now.observer.begin()
        try:
            run_schedule(actions, now.stages, now.channels, now.observer)
        finally:
            now.direct.collect(now.last_stage)

    def _inputs(self, part: TrainingPart) -> dict[int, StepInput]:
        first = self._trainer.placed.first_microbatch
        return {
            index: StepInput(
                microbatch.sizes,
                {value.name: microbatch.inputs[value.name] for value in part.own},
                f"seed {self._trainer.seed} step {self._trainer.step} microbatch {first + index}",
            )
            for index, microbatch in enumerate(self._microbatches)
        }

    def _document(self) -> dict[str, Any]:
        """Return this process's document about the step."""
        now = self._trainer.now
        # the first step shows which parameters take part in the loss
        names = self._trainer.step == 0 and bool(self._microbatches)
        unused = now.synchronizer.unused if names else []
        used = [name for name in now.tensors.parameters if name not in unused] if names else []
        nonfinite = {stage.index: stage.first_nonfinite for stage in now.stages.values()}
        return step_document(self._losses, first_nonfinite=nonfinite, used=used, unused=unused)
