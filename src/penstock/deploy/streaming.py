"""Feed microbatches to one pipeline or to several side by side, and give the results in order."""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.engine.driver import Ends
from penstock.engine.executor import StageReport
from penstock.errors import TransportError
from penstock.plan.schedule.round_robin import RoundRobin
from penstock.tracing.record import FEEDER_STAGE, Recorder
from penstock.transport.messages import DATA, Message

Microbatch = tuple[Sequence[Tensor], Mapping[str, int]]


@dataclass(slots=True)
class StreamReport:
    """Times of one stream, in seconds since its first microbatch was fed, and what each stage did."""

    num_microbatches: int = 0
    num_rows: int = 0
    fill_s: float = 0.0  # until the first result
    fed_s: float = 0.0  # until the last microbatch had been taken in
    total_s: float = 0.0  # until the last result
    results_s: list[float] = field(default_factory=list)
    stages: list[StageReport] = field(default_factory=list)

    @property
    def rows_per_s(self) -> float:
        """Rows over the whole stream, fill and drain included."""
        return self.num_rows / self.total_s if self.total_s else 0.0

    @property
    def steady_rows_per_s(self) -> float:
        """Rows per second from the first result until the last input was taken in; of all of it where that is short."""
        steady = [moment for moment in self.results_s if self.fill_s < moment <= self.fed_s]
        if len(steady) < 2:
            return self.rows_per_s
        return len(steady) * self.num_rows / self.num_microbatches / (steady[-1] - self.fill_s)


@dataclass(slots=True)
class Lane:
    """One pipeline during one stream: its two ends, how many microbatches it may have, and has had."""

    ends: Ends
    window: int
    fed: int = 0
    taken: int = 0

    @property
    def has_room(self) -> bool:
        """Whether another microbatch may go in before a result comes out."""
        return self.fed - self.taken < self.window


def stream_through(
    lanes: RoundRobin[Lane], symbols: Sequence[str], microbatches: Iterable[Microbatch], report: StreamReport,
    recorder: Recorder | None = None,
) -> Generator[list[Tensor], None, None]:  # fmt: skip
    """Feed microbatches to the lanes whose turn it is and give results in order, writing the report as it goes.

    An exception of `microbatches` itself comes out here; ending the lanes is the caller's.
    """
    source = iter(microbatches) if recorder is None else _recorded(iter(microbatches), recorder)
    begin = time.perf_counter()
    exhausted = False
    fed = taken = 0
    while not exhausted or taken < fed:
        while not exhausted and lanes[fed].has_room:
            if not _feed(lanes[fed], source, symbols, report):
                exhausted = True
                for lane in lanes.items:
                    lane.ends.end()
                break
            fed += 1
            report.fed_s = time.perf_counter() - begin
            if lanes[taken].ends.has_result:
                break  # it is given before the next microbatch goes in: none waits for the pipeline to be full
        if taken < fed:
            tensors = _take(lanes[taken])
            taken += 1
            report.results_s.append(time.perf_counter() - begin)
            report.total_s = report.results_s[-1]
            report.fill_s = report.results_s[0]
            report.num_microbatches = taken
            yield tensors


def _recorded(source: Iterator[Microbatch], recorder: Recorder) -> Iterator[Microbatch]:
    """Record how long each microbatch's data takes to load."""
    number = 0
    while True:
        begin_s, cpu_s = recorder.clock(), time.thread_time()
        following = next(source, None)
        if following is None:
            return
        recorder.span("load", FEEDER_STAGE, number, begin_s, recorder.clock(), cpu_s=time.thread_time() - cpu_s)
        number += 1
        yield following


def _feed(lane: Lane, source: Iterator[Microbatch], symbols: Sequence[str], report: StreamReport) -> bool:
    """Feed the next microbatch; tells whether there was one."""
    following = next(source, None)
    if following is None:
        return False
    tensors, sizes = following
    lane.ends.feed(Message(DATA, lane.fed, tuple(sizes[s] for s in symbols), list(tensors)))
    lane.fed += 1
    report.num_rows += sizes.get("batch", 1)
    return True


def _take(lane: Lane) -> list[Tensor]:
    message = lane.ends.result()
    if message.kind != DATA or message.index != lane.taken:
        raise TransportError(
            f"the feeding process expected result {lane.taken} of the last stage, got {message}: a message "
            f"was lost or repeated; {lane.taken} results are complete, start again behind them"
        )
    lane.taken += 1
    return message.tensors
