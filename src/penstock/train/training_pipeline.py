"""A pipeline of a model in training mode: the methods of the user's training loop, which all processes run."""

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from penstock.deploy.run_options import CutOptions, ModelCall, RunOptions
from penstock.errors import PenstockError, UsageError
from penstock.graph.call import CallInputs
from penstock.group.calls import named_after
from penstock.group.entry import join_torchrun, thread_worlds, under_torchrun
from penstock.group.regroup import place_to_join
from penstock.group.world import World, failed
from penstock.tensors import find_device
from penstock.terminal.progress import working
from penstock.text import note
from penstock.train.arrangement import ScheduleChoice, TrainOptions, find_cuts
from penstock.train.captured import Captured
from penstock.train.checkpoint import Optimizers, load_checkpoint, save_checkpoint
from penstock.train.grad_scaling import follow_scalers, forget_scalers
from penstock.train.loader import Collate, Loader
from penstock.train.loss_convention import LossFunction
from penstock.train.optimizers import check_at_steps
from penstock.train.save import save_model
from penstock.train.step import StepReport, TrainingChange
from penstock.train.survival_start import check_survivable, join_training, survive
from penstock.train.trainer import Trainer, evaluate, predict
from penstock.wire import FEEDER, NUM_BUFFERS

Scheduler = TypeVar("Scheduler")


class TrainingPipeline:
    """The pipeline that `penstock.Pipeline` returns for a model in training mode.

    Example:
        pipe = penstock.Pipeline(model, (images,), microbatches=4)
        optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
        for images, labels in pipe.loader(dataset, batch_size=64, shuffle=True):
            loss = pipe.train_step(images, labels, loss_fn=F.cross_entropy)
            pipe.clip_grad_norm_(1.0)
            optimizer.step(); optimizer.zero_grad()
        pipe.save("model.safetensors")

    Every process must call every method, in the same order. Methods raise `UsageError` if the model is in evaluation
    mode, `RunError` if a process fails and `DeviceLost` if a process is lost. The constructor captures the model and
    joins the other processes; no messages are sent before the first method call.
    """

    def __init__(
        self, call: ModelCall, cut: CutOptions, run: RunOptions, options: TrainOptions, world: World | None = None
    ) -> None:
        model = call.model
        if not trains(model):
            raise UsageError("only a module in training mode, or a function that creates one, can be trained")
        self.model_name = type(model).__name__
        self._cut, self._run, self._options = cut, run, options
        self._is_module = isinstance(model, nn.Module)
        self._owns_world = world is None
        self._trainer: Trainer | None = None
        self._loaders: list[Loader] = []
        self._closed = False
        self._place = run.on_loss.joins or (place_to_join() if world is None else None)
        joins = world is None and self._place is None and under_torchrun()
        self._joined = join_torchrun(again=run.on_loss.survives) if joins else world
        try:
            if self._joined is not None:
                self._joined.between_gpus = run.between_gpus
            self._device = find_device(run.device, self._joined.position if self._joined else 0)
            first = self._place is None and (self._joined is None or self._joined.rank == FEEDER)
            with working("capturing the model", shown=first) as say:
                self._captured = Captured(
                    model,
                    call.args,
                    call.kwargs,
                    dynamic=call.dynamic,
                    weights=call.weights,
                    seed=options.seed,
                    shares=True,
                )
                self.graph = self._captured.graph
                say("choosing the cuts")
                num_processes = len(self._joined.devices) if self._joined else 1
                self.cuts = tuple(find_cuts(self.graph, cut, options, num_processes, self._captured.common_cuts))
            ScheduleChoice(options.schedule, NUM_BUFFERS)
            if run.on_loss.survives or self._place is not None:
                check_survivable(self.graph, options, run, self._device)
        except BaseException as error:
            if self._owns_world and self._joined is not None:
                self._joined.health.report(error)  # the other ranks wait for this process
                self._joined.close(0.0)
            raise

    def release(self) -> World | None:
        """Close the pipeline before training begins, and return the joined world, if any.

        Raises `UsageError` if training has begun, or if the model is a function that creates one.
        """
        if self._closed:
            raise UsageError("the pipeline is closed; make a new one")
        if self._trainer is not None or not self._is_module:
            raise UsageError("this pipeline trains; call it for outputs, or stream with a model in evaluation mode")
        self._closed = True
        return self._joined

    @property
    def trainer(self) -> Trainer:
        """The trainer of this pipeline, created on first use."""
        if self._closed:
            raise UsageError("the pipeline is closed; make a new one")
        if self._trainer is None:
            self._captured.check_trainable()
            if self._place is not None:
                self._trainer, self._joined = join_training(
                    self._place, self._captured, self._cut, self._run, self._options
                )
            else:
                self._trainer = self._begin()
            follow_scalers(self._trainer)
            trainer = self._trainer
            self._check_optimizers = check_at_steps(lambda optimizer: trainer.now.tensors.divides(optimizer))
            self._captured.hidden.hide()
            atexit.register(self._exit)  # announces this exit to the other ranks
        return self._trainer

    def _begin(self) -> Trainer:
        """Start training with all processes."""
        world = self._joined = self._joined or world_of_one()
        if world.rank == FEEDER and (untrained := self._captured.untrained()):
            note(untrained)
        try:
            with working("putting the stages in place", shown=world.rank == FEEDER):
                trainer = self._begin_in(world)
            self.cuts = tuple(trainer.now.placed.cuts)  # the cuts depend on the placement of stages
        except BaseException:
            self._closed = True
            if self._owns_world:
                world.close(0.0)
            raise
        return trainer

    def _begin_in(self, world: World) -> Trainer:
        """Create this process's trainer; report errors to the other ranks, which wait for it."""
        if self._run.threads:
            torch.set_num_threads(self._run.threads)
        try:
            trainer = Trainer(self._captured, world, self._cut, self._run, self._options, self._device)
            if self._run.on_loss.survives:
                survive(trainer, self._run)
            return trainer
        except BaseException as error:
            world.health.report(error)
            raise

    def close(self) -> None:
        """Write the trace and release all processes, after waiting for every rank (a barrier).

        If this follows from an exception, as in a `finally`, ranks that still train end with it.
        """
        self._end(wait=True, error=sys.exc_info()[1] or failed())

    def abandon(self) -> None:
        """Release all resources immediately."""
        self._end(wait=False)

    def _exit(self) -> None:
        """Announce the end of the program to the other ranks, and the exception that led to it."""
        if (error := failed()) is not None:
            self.end(error)
        else:
            self.abandon()

    def end(self, error: BaseException | None) -> None:
        """Close cleanly, or abandon the run because of the caller's error."""
        if error is None or isinstance(error, GeneratorExit):
            self.close()
            return
        if self._owns_world and not self._closed and self._joined is not None:
            self._joined.health.report(error)  # the other processes would wait for the next step
        self.abandon()

    def __enter__(self) -> "TrainingPipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)

    def _end(self, *, wait: bool, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._captured.hidden.show()
        atexit.unregister(self._exit)
        with contextlib.ExitStack() as ends:  # called in reverse order of these lines
            if self._owns_world and self._joined is not None:
                ends.callback(self._joined.close)
            if self._trainer is None:
                return
            forget_scalers(self._trainer)
            self._check_optimizers()
            ends.enter_context(self._trainer.call(named_after("close", error)))
            ends.callback(self._trainer.close, wait=wait)
            if wait and self._trainer.world.health.watching:
                # after an error a trace is worth less than the error, which its own would replace
                with contextlib.suppress(PenstockError) if error is not None else contextlib.nullcontext():
                    self._trainer.write_trace(self.model_name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the current weights in evaluation mode, for this replica's rows."""
        with self.trainer.call("the pipeline"):
            return predict(self.trainer, CallInputs(args, kwargs))

    def optimizer(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Create the optimizer of the parameters that this process holds.

        `make` receives a list of parameters and returns a `torch.optim.Optimizer`. That object is returned, so
        learning-rate schedulers accept it.

        Example:
            optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

        Raises `UsageError` if the optimizer has other parameters.
        """
        return self.trainer.optimizer(make)

    def scheduler(self, scheduler: Scheduler) -> Scheduler:
        """Register the learning-rate scheduler that the loop steps, and return it.

        With `on_loss`, a process that joins the run copies the scheduler's state, and a rollback to a checkpoint
        restores it.

        Example:
            scheduler = pipe.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000))
        """
        self.trainer.schedulers.append(scheduler)
        return scheduler

    @property
    def changes(self) -> Sequence[TrainingChange]:
        """Changes of the process group: processes that were lost or joined."""
        return self.trainer.changes

    @property
    def joins_at(self) -> str | None:
        """Address for PENSTOCK_JOIN to join this run; None if the run admits no newcomers."""
        membership = self._joined.membership if self._joined is not None else None
        return f"{membership.rendezvous.address}:{membership.rendezvous.port}" if membership is not None else None

    def loader(
        self,
        data: Any,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
    ) -> Loader:
        """Return a loader of a data set's or a DataLoader's batches on every process.

        `batch_size` is the total over all replicas. The process of a replica's first stage loads its rows; the others
        receive labels and small tensors from it, and stand-ins without values for large tensors.

        Example:
            for images, labels in pipe.loader(dataset, batch_size=64, shuffle=True): ...

        Raises `UsageError` for a data set without a length, `DataError` for an empty one.
        """
        made = Loader(
            self.trainer,
            data,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
        )
        self._loaders.append(made)
        return made

    def train_step(self, inputs: Any, labels: Any = None, loss_fn: LossFunction | None = None) -> Tensor:
        """Run forward and backward of one batch and return its loss, the same on every process.

        `inputs` is a tensor, a tuple of positional inputs or a dict of keyword inputs: the rows of this replica, as
        `loader` returns them. `loss_fn(output, labels)` runs on the last stage and returns a scalar or `(sum, count)`;
        without it the model's own loss is used. A scalar may be a mean over rows or over counted labels, or a sum; the
        result is the loss of the whole batch. `loss_fn` sees the rows of one microbatch, and sums are added over all
        microbatches and replicas: a divisor must be counted inside `loss_fn`, from its arguments, or be that of the
        whole batch. To detect which, `loss_fn` is also called on halves of the first
        microbatch, and of later ones if the first does not decide it or rows have weights. Gradients accumulate over
        steps until `optimizer.zero_grad()`.

        Example:
            loss = pipe.train_step(images, labels, loss_fn=F.cross_entropy)

        Raises `UsageError` for inputs or labels that do not fit and for fewer rows than requested microbatches,
        `RunError` for a loss that is not finite; gradients are then unchanged.
        """
        with self.trainer.call("train_step"):
            return self.trainer.train_step(inputs, labels, loss_fn)

    @property
    def last_step(self) -> StepReport:
        """Time and traffic of this process's last step."""
        return self.trainer.last_step

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient norm over the whole model, and return the norm before clipping.

        Example:
            pipe.clip_grad_norm_(1.0)
        """
        with self.trainer.call("clip_grad_norm_"):
            return self.trainer.clip_grad_norm_(max_norm)

    def evaluate(self, inputs: Any, labels: Any = None, loss_fn: LossFunction | None = None) -> float:
        """Return a function's value over all rows, with the current weights in evaluation mode.

        `loss_fn` is as for `train_step`, or any metric.

        Example:
            accuracy = pipe.evaluate(images, labels, lambda out, y: (out.argmax(-1).eq(y).sum(), len(y)))
        """
        with self.trainer.call("evaluate"):
            return evaluate(self.trainer, inputs, labels, loss_fn)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters that this process holds, by their names in the model."""
        return self.trainer.named_parameters()

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write the whole model to one safetensors file, under the names of the model's `state_dict`.

        `metadata` goes into the file's header.

        Example:
            pipe.save("model.safetensors")

        Raises `ModelError` if the file cannot be written.
        """
        with self.trainer.call("save"):
            save_model(self.trainer, Path(path), metadata)

    def save_checkpoint(self, folder: str | Path, optimizer: Optimizers = None, scheduler: Any = None) -> None:
        """Save a checkpoint: weights, optimizer, scheduler, position in the data, random state.

        Every process writes its stages, so all hosts must share the folder. An earlier checkpoint in the folder stays
        valid until the new one is complete. Pass several optimizers or schedulers as a list.

        Example:
            pipe.save_checkpoint("run/step1000", optimizer, scheduler)
            pipe.save_checkpoint("run/step1000", [slow, fast], [warm_up])

        Raises `ModelError` if the checkpoint cannot be written, or if a host does not share the folder.
        """
        with self.trainer.call("save_checkpoint"):
            save_checkpoint(self.trainer, Path(folder), optimizer, scheduler, *self._loaders)

    def load_checkpoint(self, folder: str | Path, optimizer: Optimizers = None, scheduler: Any = None) -> None:
        """Continue from a checkpoint written with any number of stages and replicas.

        Create optimizers, schedulers and loaders first, in the order in which they were created before the save; pass
        optimizers and schedulers as to `save_checkpoint`. Optimizer state that is not in the checkpoint is discarded.

        Example:
            pipe.load_checkpoint("run/step1000", optimizer, scheduler)

        Raises `UsageError` for a checkpoint of another model, `ModelError` for a damaged one.
        """
        with self.trainer.call("load_checkpoint"):
            load_checkpoint(self.trainer, Path(folder), optimizer, scheduler, *self._loaders)


def trains(model: Any) -> TypeGuard[nn.Module | Callable[[], nn.Module]]:
    """Return whether a pipeline of this model trains: a module in training mode, or a function that creates one."""
    return model.training if isinstance(model, nn.Module) else callable(model)


def world_of_one() -> World:
    """Create a world that contains only this process."""
    (world,) = thread_worlds(["this process"])
    return world
