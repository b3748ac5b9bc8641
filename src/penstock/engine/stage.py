"""One stage on this device: it takes an action and its message, computes, and returns what goes on."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from penstock.errors import RunError
from penstock.plan.schedule.actions import Action
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.eager import StageRuntime
from penstock.tensors.devices import moved, settle
from penstock.tracing.record import Recorder
from penstock.transport.messages import DATA, Message


class Stage(Protocol):
    """What the executor runs: it only computes; messages are taken and sent around it."""

    # the kinds of actions that it can run
    kinds: ClassVar[frozenset[str]]
    # whether it still needs an action's inputs when the action is done, so that they may not stay in a buffer
    keeps_inputs: ClassVar[bool]

    @property
    def device(self) -> torch.device:
        """Return where it computes."""

    def run(self, action: Action, message: Message | None) -> Message | None:
        """Run an action on the message that it takes, if it takes one; returns the message that it sends.

        Raises `RunError` where an operation fails.
        """


@dataclass(slots=True)
class ForwardStage:
    """A stage of a stream: its programs, one for each cut set, which the microbatches meet round-robin.

    With a recorder that wants units every operation is recorded.
    """

    kinds: ClassVar[frozenset[str]] = frozenset({"F"})
    keeps_inputs: ClassVar[bool] = False

    runtimes: RoundRobin[StageRuntime]
    recorder: Recorder | None = None

    @property
    def device(self) -> torch.device:
        """Return where it computes."""
        return self.runtimes.items[0].device

    def run(self, action: Action, message: Message | None) -> Message | None:
        """Compute one microbatch."""
        if message is None:
            raise RunError(f"{action} needs a microbatch, and none came; give the stage a link that brings it")
        runtime = self.runtimes[action.microbatch]
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
        settle(runtime.device)
        return Message(DATA, message.index, message.sizes, outputs)
