"""A training step: forward and backward of a process's rows, gradients of the inputs, sums over replicas, the outcome.

A caller's inputs may require gradients: those of an encoder before the pipeline, or a soft prompt. Each microbatch then
has leaves of its own, so that the caller's graph is run backward once, with the gradient of the batch's loss, however
many microbatches there are:

    encoder ─▶ features ┄ detach, cut ┄▶ leaf of each microbatch ─▶ stages ─▶ loss
            ◀─ backward ◀┄ sum over ranks, divide ┄ .grad of the leaves
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock import trees
from penstock.engine.executor import run_schedule
from penstock.engine.stages import MicrobatchRows
from penstock.errors import RunError, UsageError, everywhere
from penstock.graph.cuts import differentiable_values
from penstock.graph.rows import batch_dim, check_rows
from penstock.group.world import World
from penstock.tensors import HOST
from penstock.train.batches import WHOLE, RowCut, cut_rows
from penstock.train.loaded_batch import StepRows
from penstock.train.loss_convention import MeasuredLoss
from penstock.train.losses import Losses, check_agreed, described, is_undivided, total_count, total_loss
from penstock.train.placed_stages import PlacedStages
from penstock.train.training_tracer import TrainingTracer
from penstock.transport.base import INPUT_GRADIENTS, Transport
from penstock.transport.collectives import all_reduce
from penstock.wire import adds_up_at_once


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
        self._losses[index] = replace(measured, total=measured.total.detach())
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
        self._microbatches = [replace(m, rng_key=f"{key} {number}") for number, m in enumerate(microbatches, first)]
        if self._wanted:
            self._microbatches = _with_leaves(self._microbatches, self._wanted)
        self._losses.clear()
        now.synchronizer.begin()
        features = self._features()
        if count:
            self._run_stages(count, features)
        self.computed_s = self._world.clock()
        now.synchronizer.flush()
        document = self._document()
        if now.how.device != HOST:  # the document has read what was computed there
            self.computed_s = self._world.clock()
        return document

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
        # a GPU answers after all that is queued on it: each loss is read once, and whoever has finite ones does not ask
        # its stages
        losses = {index: replace(each, value=each.number, times=1.0) for index, each in self._losses.items()}
        finite = bool(losses) and all(math.isfinite(each.number) for each in losses.values())
        nonfinite = [] if finite else [stage.index for stage in now.stages.values() if not stage.is_finite]
        document = step_document(losses, nonfinite=nonfinite, used=used, unused=unused, problem=self._problem)
        return {**document, "wanted": self._wanted}


def check_wanted(now: PlacedStages, inputs: Mapping[str, Tensor], labels: Any, *, may_repeat: bool) -> None:
    """Raise `UsageError` if a gradient that the caller's inputs or labels require cannot be computed."""
    if now.placed.num_microbatches > 1 and any(label.grad_fn is not None for label in trees.tensors(labels)):
        raise UsageError(
            "labels that require a gradient cannot be used by several microbatches; detach() them, or pass what they "
            "are computed from as an input of the model"
        )
    wanted = [name for name, tensor in inputs.items() if tensor.requires_grad]
    if not wanted:
        return
    reason = ""
    if len(now.placed.grid.replicas) > 1:
        reason = "each replica would have the gradient of its own rows only; use replicas=1"
    elif may_repeat:
        reason = "on_loss may repeat the step; use on_loss='stop'"
    elif now.placed.skipped or _stops(now, wanted):
        reason = "stages before the first trained parameter send no gradients; use stages=1"
    elif elsewhere := [name for name in wanted if inputs[name].is_meta]:
        reason = f"{elsewhere[0]!r} has no values in this process; load it on every rank"
    if reason:
        raise UsageError(f"the input {wanted[0]!r} requires a gradient, but {reason}, or detach() it if it needs none")


def _stops(now: PlacedStages, wanted: Sequence[str]) -> bool:
    """Return whether a gradient cannot cross from a later stage to an input."""
    graph, parts = now.captured.graph, now.parts
    if len(parts) == 1:
        return False
    reached = differentiable_values(graph, now.captured.trainable, wanted)
    return any(
        value.name in reached and place not in part.backward_inputs
        for part in parts
        for place, value in enumerate(part.crossing)
    )


def _with_leaves(microbatches: Sequence[MicrobatchRows], wanted: Sequence[str]) -> list[MicrobatchRows]:
    """Return the microbatches with leaves as these inputs."""
    return [
        replace(
            microbatch,
            inputs={
                name: x.detach().requires_grad_() if name in wanted else x for name, x in microbatch.inputs.items()
            },
        )
        for microbatch in microbatches
    ]


@everywhere()
def check_same(gathered: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise `UsageError` on all ranks unless the same inputs require gradients everywhere."""
    wanted = [document["wanted"] for document in gathered]
    if other := next((rank for rank, each in enumerate(wanted) if each != wanted[0]), None):
        raise UsageError(
            f"inputs that require a gradient must be the same on all ranks; got {wanted[0]} on {names[0]} and "
            f"{wanted[other]} on {names[other]}"
        )


def give_back(
    now: PlacedStages,
    inputs: Mapping[str, Tensor],
    wanted: Sequence[str],
    microbatches: Sequence[MicrobatchRows],
    divisor: float,
    transport: Transport,
) -> None:
    """Run the caller's graph backward from the inputs, on every rank, with the gradients of the batch's loss."""
    dims = {value.name: batch_dim(value) for value in now.captured.graph.tensor_inputs()}
    gradients = []
    for name in wanted:
        given = inputs[name]
        parts = [m.inputs[name] for m in microbatches]
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in parts]
        dim = dims[name]
        gradient = sum(found[1:], found[0]) if dim is None else torch.cat(found, dim)
        flat = gradient.to(HOST).reshape(-1).clone()
        if transport.size > 1:
            ranks = range(transport.size)
            all_reduce(transport, flat, ranks, INPUT_GRADIENTS, at_once=adds_up_at_once(len(ranks), flat.nbytes))
        gradients.append((flat / divisor).reshape(given.shape).to(given.device))
    torch.autograd.backward([inputs[name] for name in wanted], gradients)


def step_document(
    losses: Mapping[int, MeasuredLoss],
    *,
    nonfinite: Iterable[int],
    used: Iterable[str],
    unused: Iterable[str],
    problem: str = "",
) -> dict[str, Any]:
    """Return a process's document about a step: the losses of its microbatches, and stages with non-finite numbers.

    `nonfinite` are stages with non-finite numbers; `used` and `unused` are names of parameters held here; `problem` is
    why the rows cannot be trained on (see `RowExchange`).
    """
    return {
        **described([losses[index] for index in sorted(losses)]),
        "nonfinite": list(nonfinite),
        "unused": list(unused),
        "used": list(used),
        "problem": problem,
    }


class LossTensor(Tensor):
    """The loss of a step, whose backward has run: another one raises `UsageError`."""

    __module__ = "torch"  # Weights & Biases recognizes tensors by the names of their module and class

    def backward(self, *_: Any, **__: Any) -> None:
        """Raise `UsageError`."""
        raise UsageError("train_step has run the backward of this loss; remove loss.backward() from the loop")

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a tensor, so that files need no class of this package."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


@everywhere()
def mean_loss(gathered: Sequence[Mapping[str, Any]], step: int, last_stage: int) -> float:
    """Return the loss of the whole batch, added up in the order of replicas and microbatches.

    Raises `RunError` for a non-finite loss, `UsageError` if ranks compute with different random numbers, on every
    process, so that none waits and training can continue.
    """
    check_same_rows(gathered)
    check_agreed(gathered)
    loss, total = total_loss(gathered), total_count(gathered)
    if not math.isfinite(loss):
        stages = [stage for document in gathered for stage in document["nonfinite"]]
        where = f"stage {min(stages)}" if stages else f"stage {last_stage}, in the loss itself"
        raise RunError(
            f"the loss of step {step} is {loss}: the first numbers that are not finite came from {where}; "
            "lower the learning rate, clip gradients, or look at this batch"
        )
    if not total:
        raise RunError(f"the loss of step {step} is undefined: no label of the batch counts; skip such batches")
    used = {name for document in gathered for name in document["used"]}
    unused = sorted({name for document in gathered for name in document["unused"]} - used)
    if unused and step == 0:
        raise RunError(
            f"{len(unused)} parameters do not contribute to the loss, first {unused[0]}; freeze them with "
            "requires_grad_(False), or use their output"
        )
    return loss / total


@everywhere()
def check_same_rows(gathered: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UsageError` on every process if ranks of a replica would compute with different random numbers."""
    if problem := next((document["problem"] for document in gathered if document["problem"]), ""):
        raise UsageError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingChange:
    """A switch of a training run to another process group at a step, and its duration in seconds.

    `went_back` is set if all state was restored from a checkpoint of that step.
    """

    step: int
    why: str
    took_s: float
    processes: int
    replicas: int
    stages: int
    went_back: bool = False


@dataclass(slots=True)
class StepReport:
    """Time and traffic of one process's step, in seconds and bytes.

    `wait_s` is spent waiting for messages of neighbours, including sends; `synchronize_s` for gradient sums that did
    not overlap with backwards, and for the losses of other ranks. `peak_memory_bytes` is the process's peak so far.
    `num_synchronizations` counts gradient sums with other processes, `synchronized_bytes` the bytes of these gradients.

    Example:
        loss = pipe.train_step(images, labels, F.cross_entropy)
        print(pipe.last_step.forward_s, pipe.last_step.sent_bytes)
    """

    load_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    synchronize_s: float = 0.0
    sent_bytes: int = 0
    num_synchronizations: int = 0
    synchronized_bytes: int = 0
    peak_memory_bytes: int = 0
