"""A pipeline in place, as the process that feeds it sees it."""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.counters import Counters
from penstock.engine.observer import StageReport, StreamReport
from penstock.engine.placement import StagesJob
from penstock.engine.stall import StallWatch
from penstock.engine.tracers import FeederTracer
from penstock.engine.wiring import Channels
from penstock.group.world import World
from penstock.tracing.trace import StreamTrace


class Stream(Protocol):
    """What drives a stream."""

    def abandon(self) -> None:
        """End at once, whatever is under way."""

    def finish(self) -> list[StageReport]:
        """End the stream; returns the stages' reports."""


@dataclass(slots=True)
class Place:
    """Who holds a pipeline, the feeder's ends of it, what is counted there, and the last stream's report.

    `window` bounds the microbatches that may be in it; `counters` count what the feeder sent and took.
    """

    world: World
    job: StagesJob
    symbols: Sequence[str]
    channels: Channels
    watch: StallWatch
    counters: Counters
    window: int
    tracer: FeederTracer | None = None
    errors: "queue.Queue[BaseException]" = field(default_factory=queue.Queue)  # of this process's own stages
    driver: Stream | None = None  # of the stream under way
    report: StreamReport = field(default_factory=StreamReport)  # of the last stream
    traces: Sequence[StreamTrace] = field(default_factory=list)  # of its processes, where it was recorded

    def give_up(self) -> None:
        """After a failure: end every wait of this process, so that its threads end by themselves."""
        self.world.transport.abort()
        self.channels.abort()
