"""Recording of spans on one clock, and its alignment with other clocks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.resources import peak_bytes, resident_bytes

Clock = Callable[[], float]
# Largest memory for recording in a process; plans keep it free. A span takes 170 bytes, and 2 x 70 more while sent to
# the driver: MAX_SPANS spans take 15 MB, which is some 8,000 microbatches of a stage.
RECORDING_BYTES = 32 * 2**20
MAX_SPANS = 50_000
# a rerun keeps the inputs of one microbatch for each set of cuts, and a buffer to flush the caches
KEPT_BYTES = 6 * 2**20
SCRATCH_BYTES = 12 * 2**20
# shortest interval between memory samples, which are taken between microbatches
SAMPLE_S = 0.1
# stage number of the driver's own spans; -2, -3 and so on for further parallel pipelines
FEEDER_STAGE = -1


def feeder_stage(pipeline: int) -> int:
    """Return the driver's stage number for one of several parallel pipelines."""
    return FEEDER_STAGE - pipeline


class Recorder:
    """A recorder of one process's activity: spans, and counters over time.

    Example:
        recorder = Recorder()
        begin = recorder.clock()
        ...
        recorder.span("compute", 0, 7, begin, recorder.clock(), name="F")

    Kinds of spans: compute, receive and send (check or lay out a message), wait (for a message), buffer (wait for space
    for a message), between (the thread's CPU time from one computation to the next), load (the data of a microbatch, in
    training of a batch), unit (one operation), profile (an operator recorded by torch.profiler, with its shapes in
    `detail`). In training also synchronize (gradients and losses), update (the optimizer), step (a whole step). Seconds
    are those of `clock`; `step` is the training step. Spans beyond `limit` are counted in `num_dropped` and not kept.
    """

    def __init__(self, clock: Clock = time.perf_counter, *, units: bool = False, limit: int = MAX_SPANS) -> None:
        self.clock = clock
        self.units = units
        self.num_dropped = 0
        self.step = 0
        self.spans: list[tuple[str, str, int, int, float, float, int, float, int, str]] = []
        self.counters: list[tuple[str, float, float]] = []
        self._limit = limit
        self._next_sample_s = 0.0

    def span(
        self, kind: str, stage: int, microbatch: int, begin_s: float, end_s: float,
        name: str = "", num_bytes: int = 0, cpu_s: float = 0.0, detail: str = "",
    ) -> None:  # fmt: skip
        """Record one span."""
        if len(self.spans) < self._limit:
            self.spans.append((kind, name, stage, microbatch, begin_s, end_s, num_bytes, cpu_s, self.step, detail))
        else:
            self.num_dropped += 1

    def sample(self, now_s: float) -> None:
        """Record this process's memory, unless the last sample is too recent."""
        if now_s >= self._next_sample_s:
            self._next_sample_s = now_s + SAMPLE_S
            # the peak so far, if the system does not report the current value
            self.counters.append(("memory_bytes", now_s, float(resident_bytes() or peak_bytes())))

    def clear(self) -> None:
        """Discard everything, for another stream."""
        self.spans = []
        self.counters = []
        self.num_dropped = 0
        self._next_sample_s = 0.0


@dataclass(frozen=True, slots=True)
class Track:
    """A recorder for one stage's messages in one direction: F for activations, B for gradients."""

    recorder: Recorder
    stage: int
    name: str = "F"

    def now(self) -> float:
        """Return the seconds on the recorder's clock."""
        return self.recorder.clock()

    def took(self, microbatch: int, begin_s: float, arrived_s: float, num_bytes: int) -> None:
        """Record the wait for a message, then its reading."""
        self.recorder.span("wait", self.stage, microbatch, begin_s, arrived_s, self.name)
        self.recorder.span("receive", self.stage, microbatch, arrived_s, self.now(), self.name, num_bytes)

    def awaited(self, microbatch: int, begin_s: float, room_s: float) -> None:
        """Record the wait for a buffer."""
        self.recorder.span("buffer", self.stage, microbatch, begin_s, room_s, self.name)

    def gave(self, microbatch: int, begin_s: float, num_bytes: int) -> None:
        """Record the sending of a message."""
        self.recorder.span("send", self.stage, microbatch, begin_s, self.now(), self.name, num_bytes)


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """Times of one request and reply: sent and returned on this clock, received and answered on the other."""

    sent_s: float
    received_s: float
    answered_s: float
    returned_s: float

    @property
    def way_s(self) -> float:
        """Seconds on the way there and back, without the time at the other side."""
        return (self.returned_s - self.sent_s) - (self.answered_s - self.received_s)


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """An offset: at `at_s` on the other clock, this clock shows `offset_s` more, with an error up to `error_s`."""

    at_s: float
    offset_s: float
    error_s: float


class Alignment(msgspec.Struct, frozen=True):
    """A clock as a linear function of another clock; `error_s` is the largest error."""

    at_s: float = 0.0
    offset_s: float = 0.0
    drift: float = 0.0
    error_s: float = 0.0

    def align(self, seconds: float) -> float:
        """Convert a time on the other clock to this clock."""
        return seconds + self.offset_s + self.drift * (seconds - self.at_s)


def read_clock(exchanges: Sequence[Exchange]) -> Reading:
    """Read another clock by the quickest of several exchanges.

    >>> round(read_clock([Exchange(0.0, 10.5, 10.5, 1.0), Exchange(2.0, 12.1, 12.2, 2.3)]).offset_s, 6)
    -10.0
    """
    best = min(exchanges, key=lambda exchange: exchange.way_s)
    there, here = (best.received_s + best.answered_s) / 2, (best.sent_s + best.returned_s) / 2
    return Reading(there, here - there, max(0.0, best.way_s / 2))


def fit_clock(readings: Sequence[Reading]) -> Alignment:
    """Fit a line through the first and the last reading; between them its error does not exceed their errors.

    >>> fit_clock([Reading(0.0, 5.0, 0.1), Reading(10.0, 5.001, 0.2)]).drift
    0.0001
    """
    first, last = readings[0], readings[-1]
    apart_s = last.at_s - first.at_s
    drift = (last.offset_s - first.offset_s) / apart_s if apart_s > 0 else 0.0
    return Alignment(first.at_s, first.offset_s, round(drift, 12), max(reading.error_s for reading in readings))
