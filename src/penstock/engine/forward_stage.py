"""A stage of a stream: forward passes of its programs, run by the executor."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from penstock.errors import RunError
from penstock.plan.schedule.actions import Action
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.registry import StageRuntime
from penstock.tensors import moved, synchronize
from penstock.tracing.record import Recorder
from penstock.transport.messages import DATA, Message


@dataclass(slots=True)
class ForwardStage:
    """A stage of a stream with its programs, one for each cut set, which run microbatches round-robin.

    With a recorder, every operation is recorded.
    """

    keeps_inputs: ClassVar[bool] = False

    runtimes: RoundRobin[StageRuntime]
    recorder: Recorder | None = None

    @property
    def device(self) -> torch.device:
        """Device on which the stage computes."""
        return self.runtimes.items[0].device

    def run(self, action: Action, message: Message | None) -> Message | None:
        """Compute one microbatch."""
        if message is None:
            raise RunError(f"{action} needs a microbatch, but received none; add a link to the stage that carries it")
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
        synchronize(runtime.device)
        return Message(DATA, message.index, message.sizes, outputs)
