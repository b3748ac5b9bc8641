"""The one executor: takes a schedule's actions in order and does them."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.channels import Inlet, Outlet
from penstock.engine.counters import Progress
from penstock.engine.profile_window import ProfileWindow
from penstock.engine.reference import measure_alone
from penstock.errors import ConnectionBroken, RunError, TransportError
from penstock.plan.schedule.actions import Action
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.runtime.eager import Runtime, StageRuntime
from penstock.tensors.devices import held_bytes, moved, settle
from penstock.tensors.layout import copy_exactly
from penstock.tracing.record import KEPT_BYTES, Recorder
from penstock.tracing.trace import Alone
from penstock.transport.messages import CLOSE, DATA, END, Message


@dataclass(slots=True)
class StageReport:
    """What one stage did during one stream, in seconds.

    `compute_cpu_s` is CPU time of the thread that computes while it computes; where it falls behind `compute_s`
    something else had the core. `cpu_s` is CPU time of the whole process during the stream, `memory_bytes` what the
    process held, on a GPU there, when the stage had done its last microbatch (see `held_bytes`).
    """

    stage: int
    device: str
    num_microbatches: int = 0
    compute_s: float = 0.0
    compute_cpu_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    send_s: float = 0.0
    memory_bytes: float | None = None


@dataclass(slots=True)
class StageSlot:
    """A stage on this device: what it runs, where its microbatches come from and go to."""

    index: int
    runtimes: RoundRobin[StageRuntime]
    inlet: Inlet
    outlet: Outlet
    report: StageReport
    clock: Callable[[], float] = field(default=time.perf_counter)
    progress: Progress = field(default_factory=Progress)
    others: int = 0  # stages of the model beside this one
    began_cpu_s: float = 0.0
    recorder: Recorder | None = None
    kept: dict[int, Message] = field(default_factory=dict)  # a microbatch for each program, to run again alone
    alone: Alone | None = None
    profile: ProfileWindow | None = None
    computed_at: tuple[float, float] | None = None  # the last computation's end, by the clock and in CPU seconds

    def start_report(self) -> None:
        """Begin counting for another stream."""
        self.report = StageReport(self.report.stage, self.report.device)


class Performer(Protocol):
    """A stage that does whatever action a schedule has for it: one that is trained."""

    def perform(self, action: Action) -> None:
        """Do one action."""


def carry_out(actions: Iterable[Action], stages: Mapping[int, Performer]) -> None:
    """Do a finite schedule's actions, as of one step of training."""
    for action in actions:
        stages[action.stage].perform(action)


def serve(
    slots: Mapping[int, StageSlot], schedule: Callable[[], Iterable[Action]], ended: Callable[[], None] = lambda: None
) -> None:
    """Run stream after stream until a CLOSE message comes; every stream starts the schedule again.

    `ended` is called behind each stream.
    """
    while execute(schedule(), slots) != CLOSE:
        ended()
        for slot in slots.values():
            slot.start_report()


def execute(actions: Iterable[Action], slots: Mapping[int, StageSlot]) -> int:
    """Do the actions of one stream; gives the kind of the message that ended it, END or CLOSE.

    The end of a stream passes from stage to stage behind the last microbatch and collects each
    stage's report on its way.
    """
    ended: dict[int, int] = {}
    with torch.inference_mode():
        for action in actions:
            slot = slots[action.stage]
            if action.stage in ended:
                continue
            kind = _forward(slot, action.microbatch)
            if kind != DATA:
                ended[action.stage] = kind
                if len(ended) == len(slots):
                    return kind
    raise RunError("the schedule ended before the stream did; give it as many microbatches as the stream has")


def _forward(slot: StageSlot, microbatch: int) -> int:
    """Take one message, compute, pass the result on."""
    begin = slot.clock()
    message = _take(slot, microbatch)
    taken = slot.clock()
    report = slot.report
    if message.kind != DATA:
        _pass_on(slot, message)
        return message.kind
    runtime = slot.runtimes[microbatch]
    if not report.num_microbatches:
        slot.began_cpu_s = time.process_time()
    cpu_s = time.thread_time()
    sizes = dict(zip(runtime.program.symbols, message.sizes, strict=True))
    try:
        message.tensors = [moved(tensor, runtime.device) for tensor in message.tensors]
        outputs = _run(slot, runtime, sizes, message)
        settle(runtime.device)
    except RunError as error:
        raise RunError(f"stage {slot.index}, microbatch {microbatch}: {error}") from error
    computed = slot.clock()
    cpu_s = time.thread_time() - cpu_s
    report.compute_cpu_s += cpu_s
    if slot.recorder is not None:
        _record(slot, slot.recorder, microbatch, taken, computed, cpu_s)
    slot.progress.computed += 1
    slot.progress.busy_s += computed - taken
    slot.outlet.put(Message(DATA, message.index, message.sizes, outputs))
    slot.progress.passed += 1
    slot.inlet.release()
    report.num_microbatches += 1
    # the wait before the first microbatch is the pipeline filling up, not this stage idling
    if report.num_microbatches > 1:
        report.wait_s += taken - begin
    report.compute_s += computed - taken
    report.send_s += slot.clock() - computed
    return DATA


def _record(slot: StageSlot, recorder: Recorder, microbatch: int, taken: float, computed: float, cpu_s: float) -> None:
    """Record a computation, and the CPU time that this thread took since the last one."""
    now_cpu_s = time.thread_time()
    if slot.computed_at is not None and microbatch:
        before_s, before_cpu_s = slot.computed_at
        between_s = now_cpu_s - cpu_s - before_cpu_s
        recorder.span("between", slot.index, microbatch, before_s, taken, cpu_s=between_s)
    slot.computed_at = computed, now_cpu_s
    recorder.span("compute", slot.index, microbatch, taken, computed, "F", cpu_s=cpu_s)
    recorder.sample(computed)


def _run(slot: StageSlot, runtime: StageRuntime, sizes: Mapping[str, int], message: Message) -> list[Tensor]:
    """Compute; where it is recorded, operation by operation if asked for."""
    recorder = slot.recorder
    if recorder is None:
        return runtime(sizes, message.tensors)
    _keep(slot, message)
    if slot.profile is not None:
        with slot.profile.around(slot.index, message.index):
            return runtime(sizes, message.tensors)
    if not recorder.units or not isinstance(runtime, Runtime):
        return runtime(sizes, message.tensors)
    at_s = recorder.clock()
    outputs, seconds = runtime.watched(sizes, message.tensors, recorder.clock)
    for op, taken_s in zip(runtime.program.ops, seconds, strict=True):
        recorder.span("unit", slot.index, message.index, at_s, at_s + taken_s, op.name)
        at_s += taken_s
    return outputs


def _keep(slot: StageSlot, message: Message) -> None:
    """Keep a microbatch of each program, to be run again alone, as long as all of them together stay small."""
    program = slot.runtimes.order[message.index % len(slot.runtimes.order)]
    if program in slot.kept:
        return
    num_bytes = sum(tensor.nbytes for tensor in message.tensors)
    before = sum(tensor.nbytes for kept in slot.kept.values() for tensor in kept.tensors)
    if not slot.kept or before + num_bytes <= KEPT_BYTES:
        tensors = [copy_exactly(tensor) for tensor in message.tensors]
        slot.kept[program] = Message(DATA, message.index, message.sizes, tensors)


def _take(slot: StageSlot, microbatch: int) -> Message:
    """Take the next message, which is this microbatch, or the end of a stream of so many, or the word to stop."""
    try:
        message = slot.inlet.take()
    except ConnectionBroken:
        raise
    except TransportError as error:
        raise TransportError(f"stage {slot.index}, microbatch {microbatch}: {error}") from error
    # the end says how many there were: where devices take turns, the next one of this device may lie further on
    expected = message.kind == CLOSE or (
        message.index <= microbatch if message.kind == END else message.index == microbatch
    )
    if not expected:
        raise TransportError(
            f"stage {slot.index} expected microbatch {microbatch}, got {message}: a message was lost or repeated; "
            "start again"
        )
    slot.progress.taken += 1 if message.kind == DATA else slot.inlet.width
    return message


def _pass_on(slot: StageSlot, message: Message) -> None:
    """Send the end of the stream further, with this stage's report added to it."""
    body = message.body
    if message.kind == END:
        if slot.report.num_microbatches:
            slot.report.cpu_s = time.process_time() - slot.began_cpu_s
            slot.report.memory_bytes = held_bytes(slot.runtimes.items[0].device)
            if slot.kept:
                slot.alone = measure_alone(slot.index, slot.runtimes, list(slot.kept.values()), others=slot.others)
        reports = json.loads(message.body or b"[]")
        body = json.dumps([*reports, asdict(slot.report)]).encode()
    slot.progress.computed += slot.inlet.width
    slot.outlet.put(Message(message.kind, message.index, body=body))
    slot.progress.passed += slot.outlet.width
    if message.kind == END:
        slot.inlet.release()
