"""Stages as the executor runs them: one that only runs forwards, one that trains and keeps microbatches until B."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.engine.gradients import Synchronizer
from penstock.errors import RunError
from penstock.graph.cuts import TrainingPart
from penstock.plan.schedule.schedules import Action
from penstock.runtime.registry import StageRuntime
from penstock.runtime.training import TrainingRuntime, WeightHalf, backward_inputs, backward_weights
from penstock.tensors import HOST, moved
from penstock.tracing.record import Recorder
from penstock.transport.messages import DATA, Message

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MicrobatchRows:
    """The rows of one microbatch in training: sizes, the model's inputs by name, and labels.

    `rng_key` (seed, step and microbatch) determines its random numbers.
    """

    sizes: Sizes
    inputs: Mapping[str, Tensor]
    labels: Any
    rng_key: str = ""


# maps a microbatch, by number, and its outputs of the last stage to the sum to minimize
Head = Callable[[int, MicrobatchRows, Sequence[Tensor]], Tensor | None]


@dataclass(slots=True)
class _ForwardState:
    """State of a microbatch kept until its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    loss: Tensor | None = None
    half: WeightHalf | None = None


@dataclass
class TrainingStage:
    """A stage that runs training actions: forward, whole or split backward, synchronization.

    `leaves` are the trained parameters, by name; backwards accumulate in their `grad`, and `synchronizer` learns when
    these are final. `head` computes the loss on the last stage; `saw_leaves` receives the leaves that a loss depends on
    directly, such as penalized parameters, before they have gradients. With `recompute` a stage keeps only its inputs,
    and repeats its forward before its backward (Chen et al. 2016, sublinear memory cost); `recompute` is a second
    runtime, which writes buffers to copies that are never read.
    """

    keeps_inputs: ClassVar[bool] = True

    index: int
    part: TrainingPart
    runtime: TrainingRuntime
    leaves: Mapping[str, Tensor]
    head: Head | None = None
    autocast: torch.dtype | None = None
    recompute: TrainingRuntime | None = None
    synchronizer: Synchronizer | None = None
    saw_leaves: Callable[[Sequence[Tensor]], None] = lambda _leaves: None
    trains: bool = True
    step: Sequence[MicrobatchRows] = ()
    final: int = -1  # the microbatch whose backward is the last of the step
    direct: Sequence[Tensor] | None = None  # leaves that a step's loss depends on, but not through the outputs
    finite: list[Tensor] = field(default_factory=list)  # by microbatch, True if its outputs are; read at the end alone
    _kept: dict[int, _ForwardState] = field(default_factory=dict)
    _in_final: bool = False  # True during the last backward: gradients are final as they arrive

    def __post_init__(self) -> None:
        if self.synchronizer is not None:
            for name, leaf in self.leaves.items():
                leaf.register_post_accumulate_grad_hook(partial(self._leaf_done, self.synchronizer, name))

    def _leaf_done(self, synchronizer: Synchronizer, name: str, _leaf: Tensor) -> None:
        if self._in_final:
            synchronizer.leaf_done(self.index, name)

    @property
    def device(self) -> torch.device:
        """Device on which the stage computes."""
        return self.runtime.device

    @property
    def is_finite(self) -> bool:
        """True if all outputs of the step are finite, as far as they were checked."""
        return not self.finite or bool(torch.stack(self.finite).all())

    def begin(self, step: Sequence[MicrobatchRows], final: int = -1) -> None:
        """Start another step with its microbatches; `final` is the microbatch whose backward is last."""
        self.step = step
        self.final = final
        self.finite = []
        self.direct = None
        self.runtime.is_first = True
        self._kept.clear()

    def run(self, action: Action, message: Message | None) -> Message | None:
        """Run one action; raises `RunError` if an operation fails."""
        if action.kind == "S":
            if self.synchronizer is not None:
                self.synchronizer.stage_done(self.index)
            return None
        crossing = message.tensors if message is not None else []
        result = None
        match action.kind:
            case "F":
                result = self._forward(action.microbatch, crossing)
            case "R":
                self._recompute(action.microbatch)
            case "B":
                result = self._backward(action.microbatch, crossing)
            case "I":
                result = self._backward_inputs(action.microbatch, crossing)
            case "W":
                self._backward_weights(action.microbatch)
        return result

    def _forward(self, microbatch: int, crossing: list[Tensor]) -> Message | None:
        given = self.step[microbatch]
        if self.trains:
            for position in self.part.backward_inputs:
                crossing[position].requires_grad_()
        inputs = [*crossing, *(given.inputs[value.name] for value in self.part.own)]
        kept = self._compute(self.runtime, microbatch, inputs, grad=self.trains and self.recompute is None)
        self.runtime.is_first = False
        if self.trains:
            self._check_finite(kept)
            self._kept[microbatch] = kept if self.recompute is None else _ForwardState(inputs, [])
        if self.head is not None:
            return None
        return self._message(microbatch, [output.detach() for output in kept.outputs])

    def _message(self, microbatch: int, tensors: list[Tensor]) -> Message:
        sizes = self.step[microbatch].sizes
        return Message(DATA, microbatch, tuple(sizes[symbol] for symbol in self.part.program.symbols), tensors)

    def _compute(self, runtime: TrainingRuntime, microbatch: int, inputs: list[Tensor], *, grad: bool) -> _ForwardState:
        given = self.step[microbatch]
        runtime.rng_key = given.rng_key
        kind = runtime.device.type
        casting = torch.autocast(kind, dtype=self.autocast) if self.autocast else contextlib.nullcontext()
        with torch.set_grad_enabled(grad), casting:
            outputs = runtime(given.sizes, inputs)
            loss = self.head(microbatch, given, outputs) if self.head else None
        return _ForwardState(inputs, outputs, loss)

    def _check_finite(self, kept: _ForwardState) -> None:
        """Note whether outputs are finite; it is reported only if the loss is not finite."""
        # the last stage checks its loss instead of its outputs, which are large in a language model; from a GPU nothing
        # is read that nobody asks for
        if kept.loss is not None and self.device == HOST and bool(torch.isfinite(kept.loss.detach())):
            return
        outputs = [kept.outputs[position].detach() for position in self.part.backward_outputs]
        self.finite += [output.sum().isfinite() for output in outputs]

    def _recompute(self, microbatch: int) -> None:
        if self.recompute is not None:
            self._kept[microbatch] = self._compute(self.recompute, microbatch, self._kept[microbatch].inputs, grad=True)

    def _roots(self, kept: _ForwardState, crossing: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the roots of a backward, and their gradients from the next stage."""
        if self.head is not None:
            needed = kept.loss is not None and kept.loss.requires_grad
            if needed and kept.loss is not None and self.direct is None:
                self.direct = leaves_beside(kept.loss, kept.outputs)
                self.saw_leaves(self.direct)
            return ([kept.loss], [None]) if needed and kept.loss is not None else ([], [])
        positions = self.part.backward_outputs
        given = crossing or []
        pairs = [(kept.outputs[p], g) for p, g in zip(positions, given, strict=True) if kept.outputs[p].requires_grad]
        return [root for root, _ in pairs], [g for _, g in pairs]

    def _backward(self, microbatch: int, crossing: list[Tensor]) -> Message | None:
        kept = self._kept[microbatch]
        roots, gradients = self._roots(kept, crossing)
        self._in_final = microbatch == self.final
        if roots:
            torch.autograd.backward(roots, gradients)
        self._in_final = False
        del self._kept[microbatch]
        return self._gradients(microbatch, kept, [kept.inputs[p].grad for p in self.part.backward_inputs])

    def _backward_inputs(self, microbatch: int, crossing: list[Tensor]) -> Message | None:
        kept = self._kept[microbatch]
        roots, gradients = self._roots(kept, crossing)
        inputs = [kept.inputs[p] for p in self.part.backward_inputs]
        # the caller may want gradients of the model's inputs
        own = [x for x in kept.inputs[len(self.part.crossing) :] if x.requires_grad]
        found: list[Tensor | None] = [None] * len(inputs)
        if roots:
            found, kept.half = backward_inputs(roots, gradients, [*inputs, *own])
        for leaf, gradient in zip(own, found[len(inputs) :], strict=False):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        return self._gradients(microbatch, kept, found[: len(inputs)])

    def _backward_weights(self, microbatch: int) -> None:
        kept = self._kept.pop(microbatch)
        if kept.half is None:
            return
        leaves = [*self.leaves.values(), *(self.direct or ())]
        for leaf, gradient in zip(leaves, backward_weights(kept.half, leaves), strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    def _gradients(self, microbatch: int, kept: _ForwardState, gradients: Sequence[Tensor | None]) -> Message | None:
        """Return the gradients of the crossing inputs, for the previous stage."""
        inputs = [kept.inputs[position] for position in self.part.backward_inputs]
        if not inputs:
            return None
        tensors = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
        return self._message(microbatch, tensors)


def leaves_beside(loss: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that a loss depends on directly, not through the model's outputs.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> output = weight * 2
    >>> leaves_beside(output.sum() + weight.sum(), [output])
    [tensor([1., 1.], requires_grad=True)]
    """
    seen = {output.grad_fn for output in outputs}
    given = {id(output) for output in outputs}  # an output that an earlier stage passed through has no grad_fn
    waiting = [loss.grad_fn]
    found: list[Tensor] = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in given:
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found


@dataclass(slots=True)
class ForwardStage:
    """A stage of a stream with its programs; a microbatch runs the program that its message names.

    With a recorder, every operation is recorded.
    """

    keeps_inputs: ClassVar[bool] = False

    runtimes: Sequence[StageRuntime]
    recorder: Recorder | None = None

    @property
    def device(self) -> torch.device:
        """Device on which the stage computes."""
        return self.runtimes[0].device

    def run(self, action: Action, message: Message | None) -> Message | None:
        """Compute one microbatch."""
        if message is None:
            raise RunError(f"{action} needs a microbatch, but received none; add a link to the stage that carries it")
        runtime = self.runtimes[message.program]
        sizes = dict(zip(runtime.program.symbols, message.sizes, strict=True))
        message.tensors = [moved(tensor, runtime.device) for tensor in message.tensors]
        recorder = self.recorder
        if recorder is None or not recorder.units:
            outputs = runtime(sizes, message.tensors)
        else:
            at_s = recorder.clock()
            outputs, seconds = runtime.watched(sizes, message.tensors, recorder.clock)
            for op, taken_s in zip(runtime.program.ops, seconds, strict=False):
                recorder.span("unit", action.stage, message.index, at_s, at_s + taken_s, op.name)
                at_s += taken_s
        return replace(message, tensors=outputs)
