"""A stage of a stream: forward passes of its programs, run by the executor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from penstock.errors import RunError
from penstock.plan.schedule.actions import Action
from penstock.runtime.registry import StageRuntime
from penstock.tensors import moved
from penstock.tracing.record import Recorder
from penstock.transport.messages import Message


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
