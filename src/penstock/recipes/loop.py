"""The training loop, run by every process, with metrics and checkpoints."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from penstock.elastic.elastic_training import ElasticTraining, PlanChange
from penstock.errors import UsageError, exclude
from penstock.recipes.metrics import (
    ACCURACY,
    EpochResult,
    FitResult,
    RunFolder,
    best_accuracy,
    best_model,
    checkpoint_folder,
    drop_old_checkpoints,
    newest_checkpoint,
)
from penstock.recipes.settings import FitSettings, elastic_options
from penstock.recipes.tasks import Task
from penstock.terminal.live import FitProgress
from penstock.text import counted, note, say
from penstock.train.loader import Loader
from penstock.train.step import StepReport
from penstock.train.trainer import evaluate_all
from penstock.train.training_pipeline import TrainingPipeline
from penstock.wire import FEEDER

WARM_UP = 2  # steps that create connections and buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepNote:
    """One process's part of a step; for steps before a resume, only the loss is known."""

    epoch: int
    loss: float
    batch_rows: int = 0  # rows over all replicas
    counted_s: float = 0.0
    counted_units: int = 0  # units over all replicas
    sent_bytes: int = 0


class TrainingLoop:
    """One process's part of a training run."""

    def __init__(self, settings: FitSettings, task: Task, pipe: TrainingPipeline) -> None:
        self._settings, self._task, self._pipe = settings, task, pipe
        self._trainer = pipe.trainer
        self._world = self._trainer.world
        self._optimizer = pipe.optimizer(self._make_optimizer)
        self._loader = self._make_loader()
        self._elastic = (
            ElasticTraining(self._trainer, self._loader, elastic_options(settings), self._changed)
            if settings.elastic
            else None
        )
        self._num_steps = settings.steps or settings.epochs * len(self._loader)
        self._scheduler = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, self._num_steps)
            if settings.lr_schedule == "cosine"
            else None
        )
        if self._scheduler is not None:
            pipe.scheduler(self._scheduler)
        self._best: float | None = None
        if settings.join is None:
            self._resume()
        self._first = self._trainer.step
        if settings.resume and self._world.rank == FEEDER and self._first < self._num_steps:
            note(f"resuming from the checkpoint of step {self._first}, to step {self._num_steps}")
        self._saved = self._trainer.step if settings.resume else -1
        self._folder = RunFolder(settings, self._world.rank, self._first, trains=self._first < self._num_steps)
        self._epochs = self._recorded()
        self._num_changes = 0
        self._say: Callable[[str], None] = say  # above the progress, if it is shown
        self._steps: dict[int, _StepNote] = {}  # steps of epochs that have not ended or may be repeated
        if settings.resume and settings.join is None:
            losses = self._folder.losses(self._first - self._loader.position, self._first)
            self._steps = {step: _StepNote(epoch=self._loader.epoch, loss=loss) for step, loss in losses.items()}

    def _changed(self, change: PlanChange) -> None:
        """Record a change of the run's plan."""
        if self._world.rank == FEEDER:
            fields = dataclasses.asdict(change)
            self._folder.write("plan", step=fields.pop("step"), **fields)
            cached = ", outputs of frozen layers cached" if change.cached else ""
            self._say(
                f"epoch {change.epoch}: {change.frozen_layers} of {change.num_layers} layers frozen, "
                f"{counted(change.stages, 'stage')} x {counted(change.replicas, 'replica')}{cached}: {change.why}"
            )

    def _make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        given = self._settings
        if given.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=given.lr, momentum=0.9, weight_decay=given.weight_decay)
        return torch.optim.AdamW(parameters, lr=given.lr, weight_decay=given.weight_decay)

    def _make_loader(self) -> Loader:
        given, task = self._settings, self._task
        if task.batches is None:
            return self._pipe.loader(
                task.training, batch_size=given.batch_size, shuffle=True, num_workers=given.num_workers
            )
        order = task.batches(task.training, given.batch_size, True)
        return self._pipe.loader(
            DataLoader(task.training, batch_sampler=order, collate_fn=task.collate, num_workers=given.num_workers)
        )

    def _resume(self) -> None:
        """Continue from the last checkpoint, as chosen by the first process."""
        if not self._settings.resume:
            return
        found = newest_checkpoint(self._settings) if self._world.rank == FEEDER else None
        for line in found.passed_over if found is not None else ():
            note(line)
        best = best_accuracy(self._settings) if self._world.rank == FEEDER else None
        mine = {"name": found.name if found is not None else None, "best": best}
        gathered = self._trainer.together(lambda: mine)
        self._best = gathered[FEEDER]["best"]
        lost = gathered[FEEDER]["name"] is None
        exclude("--resume", lost, f"{self._settings.folder} no longer holds a complete checkpoint")
        folder = self._settings.folder / "checkpoints" / gathered[FEEDER]["name"]
        self._pipe.load_checkpoint(folder, self._optimizer, self._scheduler)
        if self._world.rank == FEEDER:
            drop_old_checkpoints(self._settings, folder)  # a killed run may have left one too many
        self._apply_settings()

    def _apply_settings(self) -> None:
        """Apply these settings' learning rate, weight decay and number of steps to the state of a checkpoint."""
        given, scheduler = self._settings, self._scheduler
        for group in self._optimizer.param_groups:
            group["weight_decay"] = given.weight_decay
            if scheduler is None:
                group["lr"] = given.lr
        if scheduler is None or (scheduler.T_max == self._num_steps and set(scheduler.base_lrs) == {given.lr}):
            return
        scheduler.T_max, scheduler.base_lrs = self._num_steps, [given.lr] * len(scheduler.base_lrs)
        # the scheduler derives each learning rate from the previous one, which belongs to another curve
        for group, rate in zip(self._optimizer.param_groups, scheduler._get_closed_form_lr(), strict=True):
            group["initial_lr"], group["lr"] = given.lr, rate
        scheduler._last_lr = [group["lr"] for group in self._optimizer.param_groups]

    def run(self) -> FitResult:
        """Train to the end; returns the result, the same on every process."""
        epochs = self._epochs
        try:
            unit, shown = self._task.unit, self._world.rank == FEEDER
            look = self._trainer.now.watch.stage_states if self._settings.live else None
            with FitProgress(self._num_steps, unit, shown=shown, done=self._first, look=look) as progress:
                self._say = progress.say
                if (unrecorded := self._unrecorded()) is not None:
                    self._finish(unrecorded)
                elif self._settings.resume and self._settings.join is None:
                    self._keep_recorded()
                while self._trainer.step < self._num_steps:
                    self._iterate(progress)
            if self._settings.save:
                self._checkpoint()
                self._pipe.save(self._settings.folder / "model.safetensors", self._task.metadata)
                if self._task.save_beside is not None and self._world.rank == FEEDER:
                    self._task.save_beside(self._settings.folder)
            self._note_changes()
        finally:
            self._folder.close()
        return FitResult(
            settings=self._settings,
            num_processes=self._world.transport.size,
            epochs=epochs,
            new_tensors=list(self._task.new_tensors),
            trained=unrecorded is not None or self._first < self._num_steps,
        )

    def _recorded(self) -> list[EpochResult]:
        """Return the epochs that this run recorded before it was resumed."""
        if not self._settings.resume or self._settings.join is not None:
            return []
        mine = {"epochs": self._folder.epochs(self._first) if self._world.rank == FEEDER else []}
        found = self._trainer.together(lambda: mine)[FEEDER]["epochs"]
        try:
            return msgspec.convert(found, list[EpochResult])
        except msgspec.ValidationError as error:
            raise UsageError(
                f"{self._settings.folder / 'metrics.jsonl'} has a line that is no epoch's result ({error}); remove it"
            ) from None

    def _unrecorded(self) -> int | None:
        """Return the epoch that ended with the checkpoint of a resumed run, if its validation failed; else None."""
        position, step = self._loader.position, self._first
        if not self._settings.resume or not step or (position and step < self._num_steps):
            return None
        epoch = self._loader.epoch - (position == 0)
        losses = self._folder.losses(step - (position or len(self._loader)), step)
        is_recorded = any(each.step == step for each in self._epochs)
        mine = {"losses": [] if is_recorded else list(losses.items())}
        found = self._trainer.together(lambda: mine)[FEEDER]["losses"]
        self._steps |= {step: _StepNote(epoch=epoch, loss=loss) for step, loss in found}
        return epoch if found else None

    def _iterate(self, progress: FitProgress) -> None:
        """Train until an iteration over the data ends: an epoch, or several after a rollback."""
        for inputs, labels, begin in self._batches():
            loss = float(self._pipe.train_step(inputs, labels, self._task.loss_fn))
            self._note_changes()
            learning_rate = self._optimizer.param_groups[0]["lr"]
            if self._update():
                continue
            self._note(loss, learning_rate, time.perf_counter() - begin)
            epoch = self._steps[self._trainer.step].epoch
            notes = self._notes_of(epoch)
            counted_s = sum(each.counted_s for each in notes)
            rate = sum(each.counted_units for each in notes) / (counted_s or 1.0)
            progress.advance(loss=loss, rate=rate)
            if self._loader.position and self._trainer.step < self._num_steps:
                if self._is_checkpoint_due():  # that at the end of an epoch is written by _finish
                    self._checkpoint()
            elif self._trainer.survivors is not None:  # within the iteration, so that a rollback continues it
                self._finish(epoch)
        if self._trainer.survivors is None:
            self._finish(self._steps[self._trainer.step].epoch)

    def _notes_of(self, epoch: int) -> list[_StepNote]:
        return [each for each in self._steps.values() if each.epoch == epoch]

    def _note_changes(self) -> bool:
        """Record recoveries from lost processes; return True if the run rolled back to a checkpoint."""
        went_back = False
        for change in self._trainer.changes[self._num_changes :]:
            if change.went_back:
                went_back = True
                self._folder.go_back(change.step)
                self._epochs[:] = [result for result in self._epochs if result.step <= change.step]
                self._steps = {step: each for step, each in self._steps.items() if step <= change.step}
            if self._world.rank == FEEDER:
                fields = dataclasses.asdict(change)
                self._folder.write("change", step=fields.pop("step"), **fields)
        self._num_changes = len(self._trainer.changes)
        return went_back

    def _batches(self) -> Iterator[tuple[Any, Any, float]]:
        """Return batches until the iteration or the run ends, with the time at which loading of each began."""
        begin = time.perf_counter()
        for inputs, labels in self._loader:
            yield inputs, labels, begin
            if self._trainer.step >= self._num_steps:
                return
            begin = time.perf_counter()

    def _update(self) -> bool:
        """Apply the gradients; return True if the run rolled back to a checkpoint instead."""
        if self._settings.clip:
            self._pipe.clip_grad_norm_(self._settings.clip)
            if self._note_changes():
                return True
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        return False

    def _note(self, loss: float, learning_rate: float, seconds: float) -> None:
        report: StepReport = self._pipe.last_step
        epoch, rows = self._loader.epoch, self._loader.last_rows
        warm = self._trainer.step - self._first > min(WARM_UP, self._num_steps - self._first - 1)
        self._steps[self._trainer.step] = _StepNote(
            epoch=epoch if self._loader.position else epoch - 1,
            loss=loss,
            batch_rows=rows,
            counted_s=seconds if warm else 0.0,
            counted_units=rows * self._task.units_per_row if warm else 0,
            sent_bytes=report.sent_bytes,
        )
        self._folder.write(
            "step",
            step=self._trainer.step,
            loss=loss,
            learning_rate=learning_rate,
            seconds=seconds,
            warm_up=not warm,
            synchronizations_per_s=report.num_synchronizations / seconds,
            **dataclasses.asdict(report),
        )

    def _finish(self, epoch: int) -> None:
        """Evaluate, gather the devices' costs, and record the epoch; stops if the run rolls back to a checkpoint."""
        notes = self._notes_of(epoch)
        # before the validation, whose failure must not cost the epoch; elastic runs need its results
        alone = self._trainer.survivors is None and self._elastic is None
        if alone and (self._settings.save or self._is_checkpoint_due()):
            self._checkpoint()
        found = self._validate() if self._settings.validate else (None, None)
        if found is None:
            return
        loss, accuracy = found
        if self._elastic is not None:
            self._elastic.validated(loss=loss, accuracy=accuracy)
        mine = {
            "steps": sum(1 for each in notes if each.batch_rows),
            "s": sum(each.counted_s for each in notes),
            "units": sum(each.counted_units for each in notes),
            "sent": sum(each.sent_bytes for each in notes),
            "memory": self._pipe.last_step.peak_memory_bytes,
            "rows": max(each.batch_rows for each in notes),
            "loss": sum(each.loss for each in notes) / len(notes),
            "best": self._best,
        }
        gathered = self._trainer.together(lambda: mine)
        if self._note_changes():
            return
        first = gathered[FEEDER]
        # a process that joined later has only a part of the epoch
        whole = [document["s"] for document in gathered if document["steps"] == first["steps"]]
        train_s = sum(whole) / len(whole)
        result = EpochResult(
            epoch=epoch,
            step=self._trainer.step,
            unit=self._task.unit,
            batch_rows=first["rows"] or self._settings.batch_size,
            train_loss=first["loss"],
            train_s=train_s,
            units_per_s=first["units"] / train_s if train_s else 0.0,
            validation_loss=loss,
            accuracy=accuracy,
            peak_memory_bytes=[document["memory"] for document in gathered],
            sent_bytes=[document["sent"] for document in gathered],
        )
        # an earlier part of it, if the run was resumed with more steps
        self._epochs[:] = [*(each for each in self._epochs if each.epoch != epoch), result]
        self._folder.write("epoch", **msgspec.structs.asdict(result))
        if self._world.rank == FEEDER:
            self._say(str(result))
        self._best = first["best"]  # a process that has joined does not know it
        if (self._settings.save or self._is_checkpoint_due()) and not self._checkpoint():
            return
        if self._trainer.survivors is None:
            self._steps.clear()
        self._keep_if_best(accuracy)

    def _keep_if_best(self, accuracy: float | None) -> None:
        keeps = self._settings.save and self._settings.keep_best
        if keeps and accuracy is not None and (self._best is None or accuracy > self._best):
            self._best = accuracy
            self._pipe.save(best_model(self._settings), {**self._task.metadata, ACCURACY: repr(accuracy)})

    def _keep_recorded(self) -> None:
        """Keep the model of the epoch that a killed run recorded last: it may have had no time to do so itself."""
        if not self._epochs or self._epochs[-1].step != self._first:
            return
        last, earlier = self._epochs[-1].accuracy, [each.accuracy for each in self._epochs[:-1]]
        if last is not None and all(each is None or each < last for each in earlier):
            self._keep_if_best(last)

    def _is_checkpoint_due(self) -> bool:
        every = self._settings.checkpoint_every
        return every is not None and self._trainer.step % every == 0

    def _validate(self) -> tuple[float, float] | None:
        """Return loss and accuracy over the validation rows; None if the run rolled back to a checkpoint."""
        given, task = self._settings, self._task
        if task.batches is None:
            loader = Loader(self._trainer, task.validation, batch_size=given.batch_size)
        else:
            order = task.batches(task.validation, given.batch_size, False)
            loader = Loader(self._trainer, DataLoader(task.validation, batch_sampler=order, collate_fn=task.collate))
        measures = [task.loss_fn, task.accuracy]
        totals = [(0.0, 0.0)] * len(measures)
        for inputs, labels in loader:
            found = evaluate_all(self._trainer, inputs, labels, measures)
            if self._note_changes():
                return None
            totals = [(a + x, b + y) for (a, b), (x, y) in zip(totals, found, strict=True)]
        self._trainer.load_s = 0.0
        return totals[0][0] / totals[0][1], totals[1][0] / totals[1][1]

    def _checkpoint(self) -> bool:
        """Write a checkpoint of this step, once; return False if the run rolled back to an earlier one instead."""
        if self._saved == self._trainer.step:
            return True
        self._saved = self._trainer.step
        folder = checkpoint_folder(self._settings, self._saved)
        self._pipe.save_checkpoint(folder, self._optimizer, self._scheduler)
        if self._note_changes():
            self._saved = -1  # write it when this step is reached again
            return False
        epoch = self._loader.epoch
        self._steps = {step: each for step, each in self._steps.items() if each.epoch >= epoch}
        if self._world.rank == FEEDER:
            drop_old_checkpoints(self._settings, folder)
        return True
