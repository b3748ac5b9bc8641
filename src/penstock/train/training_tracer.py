"""Tracing of a training run: each process records, and rank 0 gathers the traces at the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.engine.gradients import Synchronizer
from penstock.engine.observer import Observer, ProfileWindow
from penstock.engine.reference import measure_machine
from penstock.engine.tracers import ClockReadings, answer_clock, environment, give_trace, make_trace
from penstock.engine.wiring import Channels
from penstock.group.world import World
from penstock.tracing.record import FEEDER_STAGE, Recorder
from penstock.tracing.trace import RunFacts, StreamTrace
from penstock.train.arrangement import Arrangement
from penstock.wire import DEPTH, FEEDER


class TrainingTracer:
    """The recording of one process; all processes must create it, and call `gather`, at the same points.

    Example:
        tracer = TrainingTracer(world, observer, synchronizer)
        ...
        traces = tracer.gather()     # all traces on rank 0, none elsewhere
    """

    def __init__(self, world: World, observer: Observer, synchronizer: Synchronizer, *, profile: bool = False) -> None:
        self._world = world
        self._observer, self._synchronizer = observer, synchronizer
        self._channels = Channels()
        self.recorder = Recorder(world.clock)
        observer.profile = ProfileWindow(self.recorder, count=1, by_step=True) if profile else None
        self.record(True)
        self._machine = measure_machine()
        self._clocks = ClockReadings(world)
        self._others = [rank for rank in range(world.transport.size) if rank != FEEDER]
        if world.rank == FEEDER:
            self._clocks.begin(self._others)
        else:
            answer_clock(world.transport, world.clock)

    def record(self, on: bool) -> None:
        """Turn recording on or off, to measure its overhead; steps and loading are always recorded."""
        self._observer.recorder = self._synchronizer.recorder = self.recorder if on else None
        self.follow(self._channels)

    def follow(self, channels: Channels) -> None:
        """Record messages on these channels, which may have been reopened."""
        self._channels = channels
        channels.trace(self._observer.recorder, list(self._observer.counters))

    @contextmanager
    def step(self, number: int, num_rows: int) -> Iterator[None]:
        """Record a step of `num_rows` rows on this process, if the step completes."""
        self.recorder.step = number
        begin_s = self.recorder.clock()
        yield
        self._observer.settle()
        end_s = self.recorder.clock()
        self.recorder.counters.append(("rows", end_s, float(num_rows)))
        self.recorder.span("step", FEEDER_STAGE, number, begin_s, end_s)

    def load(self, number: int, begin_s: float) -> None:
        """Record that a batch has been loaded for a step."""
        self.recorder.step = number
        self.recorder.span("load", FEEDER_STAGE, number, begin_s, self.recorder.clock())

    def synchronized(self, begin_s: float) -> None:
        """Record the time for gradient sums and losses that did not overlap with backwards."""
        self.recorder.span("synchronize", FEEDER_STAGE, self.recorder.step, begin_s, self.recorder.clock(), "finish")

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer's steps."""
        began: list[float] = []

        def before(*_: object) -> None:
            began.append(self.recorder.clock())

        def after(*_: object) -> None:
            self.recorder.span("update", FEEDER_STAGE, self.recorder.step, began.pop(), self.recorder.clock())

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def gather(self) -> Sequence[StreamTrace]:
        """Gather all traces on rank 0; every process calls this at the end."""
        mine = make_trace(self._world, self.recorder, self._machine)
        if self._world.rank == FEEDER:
            return [mine, *self._clocks.take(self._others)]
        give_trace(self._world, mine)
        return []


def training_facts(world: World, placed: Arrangement, *, model: str, num_steps: int) -> RunFacts:
    """Describe a finished training run, for its folder."""
    return RunFacts(
        kind="training", model=model, ranks=tuple(r for replica in placed.grid.replicas for r in replica.stages),
        devices=tuple(world.names), hosts=tuple(world.hosts), bandwidths=tuple(world.bandwidths),
        cuts=tuple(cut.name for cut in placed.cuts), depth=DEPTH, threads=torch.get_num_threads(),
        num_microbatches=placed.num_microbatches, num_steps=num_steps, schedule=placed.schedule_name,
        environment=environment(),
    )  # fmt: skip
