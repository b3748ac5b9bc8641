"""A stage that is trained: it does a schedule's actions, and keeps each microbatch until its backward."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.channels import Inlet, Outlet
from penstock.engine.profile_window import ProfileWindow
from penstock.errors import ConnectionBroken, OutOfMemory, RunError, TransportError
from penstock.graph.training_parts import TrainingPart
from penstock.memory import is_out_of_memory
from penstock.plan.schedule.actions import Action
from penstock.runtime.split_backward import WeightHalf, backward_inputs, backward_weights
from penstock.runtime.training import TrainingRuntime
from penstock.tensors.devices import settle
from penstock.tensors.layout import copy_exactly
from penstock.tracing.record import Clock, Recorder
from penstock.transport.messages import DATA, Message

ACTIVATIONS, GRADIENTS = "activations", "gradients"
Sizes = Mapping[str, int]
# the last stage's outputs to the sum that is minimized, of this microbatch
Head = Callable[[int, Sequence[Tensor], Sizes], Tensor | None]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One microbatch as a process sees it: its sizes, and the inputs of the model that were loaded here."""

    sizes: Sizes
    own: Mapping[str, Tensor]
    draw: str


@dataclass(slots=True)
class Edges:
    """Where a stage's activations come from and go to, and its gradients; None at the ends of the pipeline."""

    inlet: Inlet | None = None
    outlet: Outlet | None = None
    gradient_inlet: Inlet | None = None
    gradient_outlet: Outlet | None = None


@dataclass(slots=True)
class _Kept:
    """What a microbatch leaves until its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    loss: Tensor | None = None
    half: WeightHalf | None = None


@dataclass
class TrainingStage:
    """Runs one stage's actions: forward, backward whole or in halves, synchronization.

    `leaves` are the parameters that are trained, by name; their `grad` gathers what backwards give.
    `head` computes the loss on the last stage. `checkpointing` keeps a stage's inputs alone and
    computes forward again before its backward (Chen et al. 2016, sublinear memory cost), then with
    `again`, whose buffers nobody reads.
    """

    index: int
    part: TrainingPart
    runtime: TrainingRuntime
    leaves: Mapping[str, Tensor]
    edges: Edges = field(default_factory=Edges)
    head: Head | None = None
    autocast: torch.dtype | None = None
    again: TrainingRuntime | None = None
    synchronize: Callable[[int], None] = lambda _stage: None
    trains: bool = True
    step: Mapping[int, StepInput] = field(default_factory=dict)
    final: int = -1  # the microbatch whose backward is the step's last
    last_backward: bool = False  # while that one is under way: gradients are final as they come
    first_odd: int | None = None  # the first microbatch of a step with an output that is not finite
    forward_s: float = 0.0  # of a step, without waits
    backward_s: float = 0.0
    wait_s: float = 0.0  # for messages to come or go
    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys((ACTIVATIONS, GRADIENTS), 0))
    taken: dict[str, int] = field(default_factory=lambda: dict.fromkeys((ACTIVATIONS, GRADIENTS), 0))
    awaits: str | None = None  # which of the two it waits for now
    num_computed: int = 0  # actions so far, and the seconds of computing them
    busy_s: float = 0.0
    clock: Clock = time.perf_counter
    recorder: Recorder | None = None
    profile: ProfileWindow | None = None  # of one step
    _since: tuple[float, float] = (0.0, 0.0)  # when the last message or action was done with, and in CPU seconds
    _kept: dict[int, _Kept] = field(default_factory=dict)

    def begin(self, step: Mapping[int, StepInput], final: int = -1) -> None:
        """Take the microbatches of another step; `final` is the one that goes back last."""
        self.step = step
        self.final = final
        self.first_odd = None
        self.forward_s = self.backward_s = self.wait_s = 0.0
        self._kept.clear()

    def perform(self, action: Action) -> None:
        """Do one action; raises `RunError` naming stage and microbatch where an operation fails."""
        if action.kind == "S":
            self.synchronize(self.index)
            return
        do = {"F": self._forward, "B": self._backward, "I": self._backward_inputs, "W": self._backward_weights}
        self._begin()
        try:
            with self._profiled(action.microbatch):
                do[action.kind](action.microbatch)
        except ConnectionBroken:
            raise
        except (RunError, TransportError) as error:
            raise type(error)(f"stage {self.index}, microbatch {action.microbatch}: {error}") from error
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            found = OutOfMemory if is_out_of_memory(error) else RunError
            raise found(f"stage {self.index}, microbatch {action.microbatch}: the backward failed: {reason}") from error

    def _profiled(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        if self.profile is None or self.recorder is None:
            return contextlib.nullcontext()
        return self.profile.around(self.index, microbatch, self.recorder.step)

    def _begin(self) -> None:
        """Whatever comes next begins now."""
        self._since = self.clock(), time.thread_time() if self.recorder is not None else 0.0

    def _computed(self, kind: str, microbatch: int) -> None:
        """Count what was computed since the last message, and record it."""
        settle(self.runtime.device)
        (begin_s, begin_cpu_s), end_s = self._since, self.clock()
        if kind == "F":
            self.forward_s += end_s - begin_s
        else:
            self.backward_s += end_s - begin_s
        self.num_computed += 1
        self.busy_s += end_s - begin_s
        if self.recorder is not None:
            cpu_s = time.thread_time() - begin_cpu_s
            self.recorder.span("compute", self.index, microbatch, begin_s, end_s, kind, cpu_s=cpu_s)
            self.recorder.sample(end_s)
        self._begin()

    def _forward(self, microbatch: int) -> None:
        given = self.step[microbatch]
        crossing: list[Tensor] = []
        if self.edges.inlet is not None:
            crossing = self._take(self.edges.inlet, microbatch, ACTIVATIONS)
        if self.trains:
            for position in self.part.backward_inputs:
                crossing[position].requires_grad_()
        inputs = [*crossing, *(given.own[value.name] for value in self.part.own)]
        kept = self._compute(self.runtime, microbatch, inputs, grad=self.trains and self.again is None)
        if self.trains:
            self._check_finite(microbatch, kept)
        self._computed("F", microbatch)
        if self.edges.outlet is not None:
            sizes = tuple(given.sizes[symbol] for symbol in self.part.program.symbols)
            outputs = [output.detach() for output in kept.outputs]
            self._put(self.edges.outlet, Message(DATA, microbatch, sizes, outputs), ACTIVATIONS)
        if self.trains:
            self._kept[microbatch] = kept if self.again is None else _Kept(inputs, [])

    def _compute(self, runtime: TrainingRuntime, microbatch: int, inputs: list[Tensor], *, grad: bool) -> _Kept:
        given = self.step[microbatch]
        runtime.draw = given.draw
        kind = runtime.device.type
        casting = torch.autocast(kind, dtype=self.autocast) if self.autocast else contextlib.nullcontext()
        with torch.set_grad_enabled(grad), casting:
            outputs = runtime(given.sizes, inputs)
            loss = self.head(microbatch, outputs, given.sizes) if self.head else None
        return _Kept(inputs, outputs, loss)

    def _check_finite(self, microbatch: int, kept: _Kept) -> None:
        """Remember where numbers went wrong first; said only where the loss is not finite either."""
        if self.first_odd is not None or (kept.loss is not None and bool(torch.isfinite(kept.loss.detach()))):
            return  # a finite loss spares the last stage another look at all its outputs: a language model's are large
        for position in self.part.backward_outputs:
            if not bool(torch.isfinite(kept.outputs[position].detach().sum())):
                self.first_odd = microbatch

    def _roots(self, microbatch: int) -> tuple[_Kept, list[Tensor], list[Tensor | None]]:
        """Return what a backward starts from, and its gradients, which cross from the stage behind."""
        kept = self._kept[microbatch]
        if self.again is not None:
            kept = self._compute(self.again, microbatch, kept.inputs, grad=True)
            self._computed("R", microbatch)
        if self.head is not None:
            needed = kept.loss is not None and kept.loss.requires_grad
            return kept, [kept.loss] if needed and kept.loss is not None else [], [None] if needed else []
        positions = self.part.backward_outputs
        given: list[Tensor | None] = []
        if self.edges.gradient_inlet is not None:
            given = list(self._take(self.edges.gradient_inlet, microbatch, GRADIENTS))
        pairs = [(kept.outputs[p], g) for p, g in zip(positions, given, strict=True) if kept.outputs[p].requires_grad]
        return kept, [root for root, _ in pairs], [g for _, g in pairs]

    def _backward(self, microbatch: int) -> None:
        kept, roots, gradients = self._roots(microbatch)
        self.last_backward = microbatch == self.final
        if roots:
            torch.autograd.backward(roots, gradients)
        self.last_backward = False
        self._computed("B", microbatch)
        self._send_back(microbatch, kept, [kept.inputs[p].grad for p in self.part.backward_inputs])
        del self._kept[microbatch]

    def _backward_inputs(self, microbatch: int) -> None:
        kept, roots, gradients = self._roots(microbatch)
        inputs = [kept.inputs[p] for p in self.part.backward_inputs]
        found: list[Tensor | None] = [None] * len(inputs)
        if roots:
            found, kept.half = backward_inputs(roots, gradients, inputs)
        self._computed("I", microbatch)
        self._send_back(microbatch, kept, found)
        self._kept[microbatch] = kept

    def _backward_weights(self, microbatch: int) -> None:
        kept = self._kept.pop(microbatch)
        if kept.half is None:
            return
        leaves = list(self.leaves.values())
        for leaf, gradient in zip(leaves, backward_weights(kept.half, leaves), strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._computed("W", microbatch)

    def _send_back(self, microbatch: int, kept: _Kept, gradients: Sequence[Tensor | None]) -> None:
        if self.edges.gradient_outlet is None:
            return
        sizes = self.step[microbatch].sizes
        inputs = [kept.inputs[position] for position in self.part.backward_inputs]
        tensors = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
        numbers = tuple(sizes[symbol] for symbol in self.part.program.symbols)
        self._put(self.edges.gradient_outlet, Message(DATA, microbatch, numbers, tensors), GRADIENTS)

    def _take(self, inlet: Inlet, microbatch: int, kind: str) -> list[Tensor]:
        """Take the next message, which is this microbatch, out of its buffer."""
        self._begin()
        self.awaits = kind
        message = inlet.take()
        self.awaits = None
        self.taken[kind] += 1
        if message.index != microbatch or message.kind != DATA:
            raise TransportError(f"expected microbatch {microbatch}, got {message}: a message was lost or repeated")
        tensors = [copy_exactly(tensor, self.runtime.device) for tensor in message.tensors]
        inlet.release()
        self.wait_s += self.clock() - self._since[0]
        self._begin()
        return tensors

    def _put(self, outlet: Outlet, message: Message, kind: str) -> None:
        self._begin()
        outlet.put(message)
        self.sent[kind] += 1
        self.wait_s += self.clock() - self._since[0]
