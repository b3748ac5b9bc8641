"""A pipeline whose stages are in place, as seen by the driver."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.counters import Counters
from penstock.engine.job import StagesJob
from penstock.engine.observer import StageReport, StreamReport
from penstock.engine.stall import StallWatch
from penstock.engine.tracers import FeederTracer
from penstock.engine.wiring import Channels
from penstock.group.world import World
from penstock.tracing.trace import StreamTrace


class Stream(Protocol):
    """The driver of a stream."""

    def abandon(self) -> None:
        """Stop immediately, without waiting for work in flight."""

    def finish(self) -> list[StageReport]:
        """End the stream; returns the stages' reports."""


@dataclass(slots=True)
class DeployedPipeline:
    """A pipeline's ranks, the driver's ends of it with their counters, and the last stream's report.

    `stage_bytes` and `cache_bytes` are the bytes of each stage's weights and caches. Microbatches use the programs in
    `order`, which repeats. `window` limits those in flight; `counters` count the driver's sent and taken messages.
    """

    world: World
    job: StagesJob
    symbols: Sequence[str]
    order: tuple[int, ...]
    stage_bytes: Sequence[int]
    cache_bytes: Sequence[int]
    channels: Channels
    watch: StallWatch
    counters: Counters
    window: int
    tracer: FeederTracer | None = None
    errors: "queue.Queue[BaseException]" = field(default_factory=queue.Queue)  # errors of this process's stages
    executor: threading.Thread | None = None  # runs this process's stages, if any
    driver: Stream | None = None  # driver of the running stream
    report: StreamReport = field(default_factory=StreamReport)  # report on the last stream
    traces: Sequence[StreamTrace] = field(default_factory=list)  # traces of its processes, if recorded

    def give_up(self) -> None:
        """Abort every wait of this process after a failure, so that its threads end."""
        self.world.transport.abort()
        self.channels.abort()
