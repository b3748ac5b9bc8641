"""Tracing of a world's stages, gathered on the driver and aligned to its clock.

a worker                                        the driver
stages deployed, the device measured
answers ◀───────── clock requests ────────────  reads every rank's clock
streams, recording ...
answers ◀───────── clock requests ────────────  reads again: offset and drift
sends its trace ─────────────────────────────▶  writes one file for each process
"""

import datetime
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from typing import TypeVar

import msgspec
import torch

from penstock.engine.executor import OwnStages
from penstock.engine.job import Tracing
from penstock.engine.observer import ProfileWindow
from penstock.engine.reference import measure_machine
from penstock.errors import TransportError
from penstock.group.world import World
from penstock.text import counted
from penstock.tracing.record import (
    FEEDER_STAGE,
    Clock,
    Exchange,
    Reading,
    Recorder,
    feeder_stage,
    fit_clock,
    read_clock,
)
from penstock.tracing.trace import Counter, MachineCapacity, PackedTrace, ProcessTrace, Span
from penstock.transport.base import CLOCK, Transport, receive_bytes, send_bytes
from penstock.wire import FEEDER

_NUM_EXCHANGES = 24
T = TypeVar("T")
MAX_TRACE_BYTES = 64 * 2**20


class StageTracer:
    """A recording of one process's stages, stream after stream, sent to the driver."""

    def __init__(self, own: OwnStages) -> None:
        self.own = own
        tracing = own.job.trace or Tracing()
        self.recorder = Recorder(own.world.clock, units=tracing.units)
        own.observer.clock = own.world.clock
        own.observer.profile = ProfileWindow(self.recorder) if tracing.profile else None
        self.record(True)
        self._machine = measure_machine()

    def record(self, on: bool) -> None:
        """Turn recording on or off, to measure its overhead. A trace with gaps is incomplete."""
        own, recorder = self.own, self.recorder if on else None
        own.observer.recorder = recorder
        for stage in own.stages.values():
            # torch's profiler records the operations itself
            stage.recorder = recorder if own.observer.profile is None else None
        own.channels.trace(recorder, list(own.stages))

    def trace(self) -> ProcessTrace:
        """Return the recording since the last call, on this process's clock."""
        trace = make_trace(self.own.world, self.recorder, self._machine)
        alone = tuple(self.own.observer.alone.values())
        self.own.observer.forget()
        return msgspec.structs.replace(trace, alone=alone)

    def give(self) -> None:
        """Answer the clock requests at the end of a stream, then send the recording."""
        give_trace(self.own.world, self.trace())


class FeederTracer:
    """The driver's recording; it also gathers the recordings of the other ranks."""

    def __init__(self, world: World, *, units: bool = False, profile: bool = False) -> None:
        self._world = world
        self.tracing = Tracing(units=units, profile=profile)
        self.recorder = Recorder(world.clock)
        self._clocks = ClockReadings(world)
        self._own: StageTracer | None = None

    def follow(self, own: OwnStages, pipeline: int = 0) -> None:
        """Start recording the driver's ends of a pipeline and its own stages; read the clocks of the other ranks."""
        own.channels.trace(self.recorder, [FEEDER_STAGE], feeder=feeder_stage(pipeline))
        if own.stages:
            self._own = StageTracer(own)
        self._clocks.begin(_others(own.job.holders))

    def loading(self, source: Iterator[T]) -> Iterator[T]:
        """Yield the items of a source, and record the time that each takes."""
        for number in count():
            begin_s, cpu_s = self.recorder.clock(), time.thread_time()
            following = next(source, None)
            if following is None:
                return
            self.loaded(number, begin_s, cpu_s)
            yield following

    def loaded(self, number: int, begin_s: float, cpu_s: float) -> None:
        """Record the loading of a microbatch since `begin_s` (recorder's clock) and `cpu_s` (thread's CPU clock)."""
        took_s = time.thread_time() - cpu_s
        self.recorder.span("load", FEEDER_STAGE, number, begin_s, self.recorder.clock(), cpu_s=took_s)

    def gather(self, ranks: Collection[int]) -> list[PackedTrace]:
        """Receive the recordings of a pipeline's ranks at the end of a stream."""
        return self._clocks.take(_others(ranks))

    def own(self) -> ProcessTrace:
        """Return the recording of this process: of the driver and of its stages."""
        mine = make_trace(self._world, self.recorder, MachineCapacity())
        if self._own is None:
            return mine
        stages = self._own.trace()
        return msgspec.structs.replace(stages, spans=(*mine.spans, *stages.spans))


def follow_stages(own: OwnStages) -> Callable[[], None]:
    """Record the stages of a worker if the job enables it; returns the function to call after each stream."""
    if own.job.trace is None:
        return lambda: None
    tracer = StageTracer(own)  # measures the machine, before any stream
    answer_clock(own.world.transport, own.world.clock)
    return tracer.give


class ClockReadings:
    """The driver's readings of other clocks, and traces aligned to its clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._readings: dict[int, list[Reading]] = {}

    def begin(self, ranks: Sequence[int]) -> None:
        """Read the clocks of ranks that call `answer_clock`."""
        for rank in ranks:
            self._readings[rank] = [self._read(rank)]

    def take(self, ranks: Sequence[int]) -> list[PackedTrace]:
        """Receive the traces of ranks that call `give_trace`."""
        traces = []
        for rank in ranks:
            # the line is fitted through the latest two readings
            self._readings[rank] = [*self._readings[rank][-1:], self._read(rank)]
            data = receive_bytes(self._world.transport, rank, CLOCK, limit=MAX_TRACE_BYTES)
            try:
                trace = msgspec.json.decode(data, type=PackedTrace)
            except msgspec.MsgspecError as error:
                raise TransportError(f"{self._world.names[rank]} sent an invalid trace: {error}; start again") from None
            readings = tuple(self._readings[rank])
            traces.append(msgspec.structs.replace(trace, readings=readings, alignment=fit_clock(readings)))
        return traces

    def _read(self, rank: int) -> Reading:
        return ask_clock(self._world.transport, rank, self._world.clock)


def give_trace(world: World, trace: ProcessTrace) -> None:
    """Answer the driver's clock requests again, then send it this process's recording."""
    answer_clock(world.transport, world.clock)
    send_bytes(world.transport, msgspec.json.encode(trace), FEEDER, CLOCK)


def make_trace(world: World, recorder: Recorder, machine: MachineCapacity) -> ProcessTrace:
    """Return the content of a recorder, and clear it."""
    trace = ProcessTrace(
        rank=world.rank,
        device=world.names[world.rank],
        machine=machine,
        num_dropped=recorder.num_dropped,
        spans=tuple(Span(*span) for span in recorder.spans),
        counters=tuple(Counter(*counter) for counter in recorder.counters),
    )
    recorder.clear()
    return trace


def ask_clock(transport: Transport, rank: int, clock: Clock) -> Reading:
    """Read the clock of a rank that calls `answer_clock`."""
    exchanges = []
    answer = torch.zeros(2, dtype=torch.float64)
    for _ in range(_NUM_EXCHANGES):
        pending = transport.receive(answer.view(torch.uint8), rank, CLOCK)
        sent_s = clock()
        transport.send(torch.zeros(8, dtype=torch.uint8), rank, CLOCK).wait()
        pending.wait()
        exchanges.append(Exchange(sent_s, float(answer[0]), float(answer[1]), clock()))
    return read_clock(exchanges)


def answer_clock(transport: Transport, clock: Clock) -> None:
    """Answer the driver's clock requests with this process's time."""
    question = torch.zeros(8, dtype=torch.uint8)
    answer = torch.zeros(2, dtype=torch.float64)
    for _ in range(_NUM_EXCHANGES):
        transport.receive(question, FEEDER, CLOCK).wait()
        received_s = clock()
        answer[0], answer[1] = received_s, clock()
        transport.send(answer.view(torch.uint8), FEEDER, CLOCK).wait()


def _others(ranks: Collection[int]) -> list[int]:
    return sorted(set(ranks) - {FEEDER})


def environment() -> dict[str, str]:
    """Return the environment of a run: versions, machine, time."""
    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {counted(os.cpu_count() or 1, 'core')}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
