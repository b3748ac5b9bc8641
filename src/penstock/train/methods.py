"""What a Pipeline offers for training, in a class of its own so that streaming and training stay apart."""

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock.deploy.programs import cuts_of_plan
from penstock.engine.wiring import DEPTH
from penstock.errors import UsageError
from penstock.graph.cuts import Cut
from penstock.graph.graph import Graph
from penstock.group.entry import join_torchrun, under_torchrun
from penstock.group.liveness import Boards, Health
from penstock.group.world import World
from penstock.spec.plan import Plan
from penstock.tensors.devices import find_device
from penstock.terminal.notes import note
from penstock.train.captured import Captured
from penstock.train.checkpoint import load_checkpoint, save_checkpoint
from penstock.train.grids import ScheduleChoice
from penstock.train.loader import Collate, Loader
from penstock.train.losses import LossFunction
from penstock.train.place import check_alone
from penstock.train.save import save_model
from penstock.train.step_report import StepReport
from penstock.train.trainer import Trainer
from penstock.transport.base import FEEDER
from penstock.transport.memory_network import MemoryNetwork


class TrainingMethods:
    """The methods of a pipeline whose model is in training mode.

    Example:
        pipe = penstock.Pipeline(model, (images,), microbatches=4)
        optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
        for images, labels in pipe.loader(dataset, batch_size=64, shuffle=True):
            loss = pipe.train_step(images, labels, loss_fn=F.cross_entropy)
            pipe.clip_grad_norm_(1.0)
            optimizer.step(); optimizer.zero_grad()
        pipe.save("model.safetensors")

    Every process calls every method, in the same order. Each raises `UsageError` where the model is in
    evaluation mode, `RunError` when something fails and `DeviceLost` when a process is gone.
    """

    graph: Graph
    cuts: tuple[Cut, ...]
    model_name: str
    _closed: bool
    _trace: Path | None
    _owns_world: bool
    _world: World
    _trainer: Trainer | None = None
    _captured: Captured | None = None
    _joined: World | None = None
    _between_gpus: str = "gloo"
    _streaming: Callable[..., None] | None = None  # what would start streaming instead
    _loader: Loader | None = None

    def _prepare_training(
        self, model: nn.Module | Callable[[], nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any] | None, *,
        dynamic: Mapping[str, Mapping[str | int, int]] | None, weights: Any, seed: int, world: World | None,
        threads: int | None, device: str | torch.device, **settings: Any,
    ) -> None:  # fmt: skip
        """Capture the model and meet the other processes; nothing is sent before the first call says what for."""
        self._joined = world or (join_torchrun() if under_torchrun() else None)
        if self._joined is not None:
            self._world = self._joined
            self._joined.between_gpus = self._between_gpus
        try:
            settings["device"] = find_device(device, self._joined.position if self._joined else 0)
            self._captured = Captured(model, args, kwargs, dynamic=dynamic, weights=weights, seed=seed)
            self.graph = self._captured.graph
            self.cuts = tuple(self._choose_cuts(self._captured, **settings))
            ScheduleChoice(settings["schedule"], 2 * DEPTH)
        except BaseException as error:
            if self._owns_world and self._joined is not None:
                self._joined.health.report(error)  # the others wait for this process
                self._joined.close(0.0)
            raise
        self._make = partial(make_trainer, self._captured, threads=threads, seed=seed, **settings)

    def _choose_cuts(
        self, captured: Captured, *, plan: Plan | None, stages: int | None, policy: str, cuts: Sequence[str] | None,
        replicas: int | None, microbatches: int | None, **_others: object,
    ) -> list[Cut]:  # fmt: skip
        """Choose where the model is cut, or read it in the plan; a plan for inference says nothing of training."""
        if plan is None:
            count = stages or (len(self._joined.devices) if self._joined else 1)
            return captured.choose(count, policy, cuts)
        check_alone(plan, stages=stages, cuts=cuts, replicas=replicas, microbatches=microbatches)
        names = {name for pipeline in plan.pipelines for name in pipeline.cut_sets[0].cuts}
        return cuts_of_plan(captured.graph, plan).find_all(sorted(names)) if plan.trains else []

    @property
    def trainer(self) -> Trainer:
        """The training that this pipeline does, begun by the first call that needs it."""
        if self._captured is None:
            raise UsageError("this pipeline streams; to train, make one of a model after model.train()")
        if self._closed:
            raise UsageError("the pipeline is closed; make a new one")
        if self._trainer is None:
            self._captured.check_trainable()
            self._world = self._joined or alone()
            if self._world.rank == FEEDER and (untrained := self._captured.untrained()):
                note(untrained)
            try:
                self._trainer = self._make(world=self._world)
                self.cuts = tuple(self._trainer.cuts)  # which depend on where stages are
            except BaseException:
                self._closed = True
                if self._owns_world:
                    self._world.close(0.0)
                raise
            self._streaming = None
            atexit.register(self._end_at_exit)  # so that the others take this end for one that is meant
        return self._trainer

    def _end_at_exit(self) -> None:
        self._end_training(wait=False)

    def _end_training(self, *, wait: bool) -> bool:
        """Let go of a training, begun or not; tells whether there was one."""
        if self._captured is None:
            return False
        if not self._closed:
            self._closed = True
            atexit.unregister(self._end_at_exit)
            try:
                if self._trainer is not None and self._trace is not None and wait and self._world.health.watching:
                    self._trainer.write_trace(self._trace, self.model_name)
            finally:
                self._let_go(wait=wait)
        return True

    def _let_go(self, *, wait: bool) -> None:
        if self._trainer is not None:
            self._trainer.close(wait=wait)
        if self._owns_world and (self._trainer is not None or self._joined is not None):
            self._world.close()

    def optimizer(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Make the optimizer of the parameters that this process holds.

        `make` gets a list of parameters and returns any `torch.optim.Optimizer` of them, which is what
        comes back: learning-rate schedulers take it.

        Example:
            optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

        Raises `UsageError` where the optimizer has other parameters.
        """
        return self.trainer.optimizer(make)

    def loader(
        self, data: Any, *, batch_size: int = 1, shuffle: bool = False, drop_last: bool = False,
        collate_fn: Collate | None = None, num_workers: int = 0,
    ) -> Loader:  # fmt: skip
        """Return batches of a data set, or of what a DataLoader loads, to every process.

        `batch_size` is that of all replicas together. Each process gets its replica's rows; where it uses
        neither inputs nor labels, tensors without values.

        Example:
            for images, labels in pipe.loader(dataset, batch_size=64, shuffle=True): ...

        Raises `UsageError` for a data set without a length, `DataError` for an empty one.
        """
        self._loader = Loader(
            self.trainer, data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last,
            collate_fn=collate_fn, num_workers=num_workers,
        )  # fmt: skip
        return self._loader

    def train_step(self, inputs: Any, labels: Any = None, loss_fn: LossFunction | None = None) -> Tensor:
        """Run forward and backward of one batch and give its loss, the same on every process.

        `inputs` is a tensor, a tuple of positional inputs or a dict of keyword inputs: the rows of this
        replica, as `loader` gives them. `loss_fn(output, labels)` runs where the last stage is and gives a
        mean, which counts once for each row, or `(sum, count)`; without it the model's own loss is taken.
        Gradients are added to those of earlier steps until `optimizer.zero_grad()`.

        Example:
            loss = pipe.train_step(images, labels, loss_fn=F.cross_entropy)

        Raises `UsageError` for inputs or labels that do not fit and for fewer rows than microbatches,
        `RunError` for a loss that is not finite; that one leaves gradients as they were.
        """
        return self.trainer.train_step(inputs, labels, loss_fn)

    @property
    def last_step(self) -> StepReport:
        """Where this process's last step went."""
        return self.trainer.last_step

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients down to a norm over the whole model, and give the norm that they had.

        Example:
            pipe.clip_grad_norm_(1.0)
        """
        return self.trainer.clip_grad_norm_(max_norm)

    def evaluate(self, inputs: Any, labels: Any = None, loss_fn: LossFunction | None = None) -> float:
        """Return the mean of a function over all rows, with the current weights in evaluation mode.

        `loss_fn` is as for `train_step`; any measure will do.

        Example:
            accuracy = pipe.evaluate(images, labels, lambda out, y: (out.argmax(-1).eq(y).sum(), len(y)))
        """
        return self.trainer.evaluate(inputs, labels, loss_fn)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters that this process holds, by their names in the model."""
        return self.trainer.named_parameters()

    def save(self, path: str | Path) -> None:
        """Write the whole model to one safetensors file, under the names of the model's `state_dict`.

        Example:
            pipe.save("model.safetensors")

        Raises `ModelError` where the file cannot be written.
        """
        save_model(self.trainer, Path(path))

    def save_checkpoint(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None
    ) -> None:
        """Write what is needed to continue: weights, optimizer, scheduler, place in the data, random state.

        Every process writes its own stages, so the folder must be one that all hosts share. A checkpoint that is in
        it already stays whole until the new one is.

        Example:
            pipe.save_checkpoint("run/step1000", optimizer, scheduler)

        Raises `ModelError` where it cannot be written, or where a host has written to a folder of its own.
        """
        save_checkpoint(self.trainer, Path(folder), optimizer, scheduler, self._loader)

    def load_checkpoint(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None
    ) -> None:
        """Continue from a checkpoint that any number of stages and replicas has written.

        Make optimizer, scheduler and loader first.

        Example:
            pipe.load_checkpoint("run/step1000", optimizer, scheduler)

        Raises `UsageError` for a checkpoint of another model, `ModelError` for one that is damaged.
        """
        load_checkpoint(self.trainer, Path(folder), optimizer, scheduler, self._loader)


def trains(model: Any) -> TypeGuard[nn.Module | Callable[[], nn.Module]]:
    """Return whether a pipeline of this model trains: a module in training mode, or a function that makes one."""
    return model.training if isinstance(model, nn.Module) else callable(model)


def make_trainer(captured: Captured, world: World, *, threads: int | None, **settings: Any) -> Trainer:
    """Make this process's part of a training; what goes wrong is told to the others, who wait for it."""
    if threads:
        torch.set_num_threads(threads)
    try:
        return Trainer(captured, world, **settings)
    except BaseException as error:
        world.health.report(error)
        raise


def alone() -> World:
    """Make a world of this process alone."""
    network, store = MemoryNetwork(1), HashStore()
    transport, names = network.transports[0], ["this process"]
    health = Health(Boards.of_threads(store, 0, 1), 0, names, transport.abort)
    return World(transport=transport, names=names, devices=[0], store=store, health=health, bandwidths=[None])
