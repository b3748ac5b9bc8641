"""One process's stages, tensors, channels and gradient sums in a placement; another placement needs a new object."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.engine.channels import LocalChannel
from penstock.engine.counters import ACTIVATIONS
from penstock.engine.gradients import Synchronizer
from penstock.engine.observer import Observer
from penstock.engine.stages import Head, MicrobatchRows, TrainingStage
from penstock.engine.stall import TrainingWatch
from penstock.engine.wiring import Channels, GrowingChannels, training_links
from penstock.errors import UsageError
from penstock.graph.cuts import TrainingPart
from penstock.group.world import World
from penstock.runtime.registry import EAGER, RuntimeChoice
from penstock.runtime.training import TrainingRuntime
from penstock.tensors import HOST
from penstock.train.arrangement import Arrangement
from penstock.train.batches import largest
from penstock.train.captured import Captured
from penstock.train.evaluation import Evaluation
from penstock.train.features import Features
from penstock.train.held_tensors import HeldTensors, written_buffers
from penstock.train.losses import OwnLoss
from penstock.transport.messages import DATA, Message

_CHANNELS = 256  # sets of tags that each placement reserves; each opening of its channels uses the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """Compute settings of stages, independent of the placement."""

    device: torch.device = HOST
    direct: bool = False  # tensors are sent from device to device
    runtime: RuntimeChoice = EAGER  # of steps; evaluation is always eager
    autocast: torch.dtype | None = None
    checkpointing: bool = False
    stall_s: float


class PlacedStages:
    """One process's stages in a placement of the training run, with all dependent state.

    All processes create theirs at the same time. `before` is the object of the previous placement, already closed:
    tensors that this process holds stay, others migrate. `number` counts the placements. `features` provides the
    outputs of skipped stages.
    """

    def __init__(
        self,
        world: World,
        captured: Captured,
        placed: Arrangement,
        how: Computing,
        head: Head,
        *,
        before: "PlacedStages | None" = None,
        features: Features | None = None,
    ) -> None:
        self.number: int = before.number + 1 if before is not None else 0
        self.captured, self.placed, self.how, self.features = captured, placed, how, features
        self._world, self.head = world, head
        transport = world.transport
        self.parts: list[TrainingPart] = captured.parts(placed.cuts, how.autocast, how.device)
        self.tensors: HeldTensors = HeldTensors(
            world, placed.grid, captured, self.parts, how.device, before=before.tensors if before is not None else None
        )
        self.order = [state.source for state in captured.graph.states]
        self.synchronizer = Synchronizer(transport, self.tensors.weights(), self.order)
        self.direct = DirectLeaves(self.tensors, self.synchronizer, alone=transport.size == 1)
        self.stages = {stage: self._make_stage(stage) for stage in self.tensors.stages if stage >= placed.skipped}
        self.observer = Observer(self.stages, world.clock)
        links = [link for link in training_links(self.parts) if link.source >= placed.skipped]
        links = [link for link in links if link.target >= placed.skipped]
        first = placed.skipped
        self._from_cache = LocalChannel(None) if first and first in self.stages else None
        self._channels = GrowingChannels(
            transport,
            links,
            placed.replica,
            device=how.device,
            direct=how.direct,
            first_generation=_CHANNELS * self.number,
        )
        self._evaluated = 0  # sets of tags that earlier evaluations used
        self.watch = TrainingWatch(world, links, placed.grid.replicas, self.observer, how.stall_s)

    @property
    def channels(self) -> Channels:
        """Currently open channels."""
        return self._channels.channels

    @property
    def last_stage(self) -> int:
        """Index of the stage that computes the loss."""
        return self.placed.num_stages - 1

    def open_channels(self, microbatches: Sequence[MicrobatchRows]) -> bool:
        """Open larger channels if a microbatch is larger than all earlier ones; return whether any was opened."""
        opened = self._channels.fit(largest(microbatches))
        if opened and self._from_cache is not None:
            self.channels.receivers[self.placed.skipped, ACTIVATIONS] = self._from_cache
        return opened

    def feed(self, microbatches: Sequence[MicrobatchRows], features: Sequence[Tensor] | None) -> None:
        """Pass the first running stage its inputs, as if the skipped stages before it had sent them.

        Without `features`, the skipped stages are computed here.
        """
        channel = self._from_cache
        if channel is None:
            return
        begin = 0
        for index, microbatch in enumerate(microbatches):
            sizes = microbatch.sizes
            end = begin + sizes["batch"]
            outputs = self._skipped_outputs(microbatch) if features is None else [x[begin:end] for x in features]
            symbols = self.parts[self.placed.skipped].program.symbols
            channel.put(Message(DATA, index, tuple(sizes[symbol] for symbol in symbols), outputs))
            begin = end

    def _skipped_outputs(self, microbatch: MicrobatchRows) -> list[Tensor]:
        """Compute the skipped stages, all of which this process holds, on rows without cached outputs."""
        crossing: list[Tensor] = []
        kind, dtype = self.how.device.type, self.how.autocast
        with torch.no_grad(), torch.autocast(kind, dtype=dtype) if dtype else contextlib.nullcontext():
            for part, runtime in zip(self.parts, self._skipped_runtimes, strict=False):
                own = [microbatch.inputs[value.name] for value in part.own]
                crossing = runtime(microbatch.sizes, [*crossing, *own])
        return crossing

    @cached_property
    def _skipped_runtimes(self) -> list[TrainingRuntime]:
        parts = self.parts[: self.placed.skipped]
        return [EAGER.load_training(p, self.tensors.of_program(p.program, {}), self.how.device) for p in parts]

    @cached_property
    def own_loss(self) -> OwnLoss:
        """The loss that the model itself computes, and whether it is a mean or a sum over rows."""
        return OwnLoss(self.captured.graph)

    def _make_stage(self, index: int) -> TrainingStage:
        part, leaves, how = self.parts[index], self.tensors.leaves[index], self.how
        tensors = self.tensors.of_program(part.program, leaves)
        recompute = None
        if how.checkpointing:
            sources = set(written_buffers(part))
            written = {s.value.name for s in part.program.states if s.source in sources}
            spare = {name: tensor.clone() if name in written else tensor for name, tensor in tensors.items()}
            recompute = how.runtime.load_training(part, spare, how.device, again=True)
        runtime = how.runtime.load_training(part, tensors, how.device)
        if index == self.last_stage:
            for each in filter(None, (runtime, recompute)):
                each.around = dict.fromkeys(self.own_loss.counting, self.own_loss.around)
        return TrainingStage(
            index=index,
            part=part,
            runtime=runtime,
            leaves=leaves,
            head=self.head if index == self.last_stage else None,
            autocast=how.autocast,
            recompute=recompute,
            synchronizer=self.synchronizer,
            saw_leaves=self.direct.saw,
        )

    @cached_property
    def evaluation(self) -> Evaluation:
        """Evaluation with the same weights."""
        return Evaluation(
            self._world,
            self.captured,
            self.placed.replica,
            self.tensors,
            cuts=self.placed.cuts,
            autocast=self.how.autocast,
            num_microbatches=self.placed.num_microbatches,
            direct=self.how.direct,
            first_generation=_CHANNELS * self.number + self._evaluated,
        )

    def evaluate_again(self) -> None:
        """Make the stages of the evaluation again, from the graph that the model has now."""
        if "evaluation" in vars(self):
            self.evaluation.abort()
            self._evaluated += self.evaluation.num_openings
            del self.evaluation

    def close(self) -> None:
        """Stop the watch, and abort waits within this process."""
        self.watch.close()
        self.channels.abort()
        if "evaluation" in vars(self):
            self.evaluation.abort()
        if self.features is not None:
            self.features.close()
        self.synchronizer.close()


class DirectLeaves:
    """Gradients that reach leaves directly from a step's loss, not through the model's outputs.

    Autograd adds these gradients to `.grad`, microbatch by microbatch. They are part of the sum over the batch, so they
    are taken out of `.grad` and added to that sum:

        direct.saw(leaves)             # before the first backward: saves and clears `.grad`
        ...                            # backwards
        direct.collect(stage)          # adds gradients of the model's parameters to the stage's, keeps the others
        direct.add(divisor)            # divides the others by the batch's divisor and adds them to `.grad`

    """

    def __init__(self, tensors: HeldTensors, synchronizer: Synchronizer, *, alone: bool) -> None:
        self._tensors, self._synchronizer, self._alone = tensors, synchronizer, alone
        self._before: list[tuple[str | None, Tensor, Tensor | None]] = []  # name if in the model, leaf, `.grad`
        self._own: list[tuple[Tensor, Tensor]] = []  # tensors of the loss, and their gradients

    def saw(self, leaves: Sequence[Tensor]) -> None:
        """Record the leaves of a step's loss.

        Raises `UsageError` if several processes train and a trainable tensor is not a parameter of the model, or if a
        parameter has a hook, which would see only a part of its gradient.
        """
        if not leaves:  # the usual case
            return
        named = {id(parameter): name for name, parameter in self._tensors.parameters.items()}
        strange = [leaf for leaf in leaves if id(leaf) not in named]
        if strange and not self._alone:
            raise UsageError(
                f"loss_fn has a trainable tensor of shape {list(strange[0].shape)} that is not in the model, so one "
                "process alone would train it; make it a part of the model"
            )
        for leaf in leaves:
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                raise UsageError(
                    f"{named.get(id(leaf), 'a tensor of loss_fn')} has a hook, and loss_fn uses it directly, so the "
                    "hook would see parts of its gradient; remove the hook or the use"
                )
        self._synchronizer.hold_back(named[id(leaf)] for leaf in leaves if id(leaf) in named)
        self._before = [(named.get(id(leaf)), leaf, leaf.grad) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None

    def collect(self, stage: int) -> None:
        """Add the gradients to those of the stage that computes the loss, and restore the earlier `.grad`."""
        self._own = []
        for name, leaf, before in self._before:
            gradient, leaf.grad = leaf.grad, before
            if gradient is None:
                continue
            if name is None:
                self._own.append((leaf, gradient))
                continue
            # the gradient of a parameter of another stage of this process is added there
            held = [leaves[name] for leaves in self._tensors.leaves.values() if name in leaves]
            into = self._tensors.leaves[stage].get(name, held[0])
            into.grad = gradient if into.grad is None else into.grad + gradient
        self._before = []

    def add(self, divisor: float) -> None:
        """Accumulate the gradients of the loss's trainable tensors in their `.grad`."""
        for leaf, gradient in self._own:
            gradient = gradient / divisor
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._own = []
