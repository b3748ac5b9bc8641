"""Recording of spans and counters, one list append each, without any cost when disabled."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.memory import peak_bytes, resident_bytes

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

    def gave(self, microbatch: int, begin_s: float, room_s: float, num_bytes: int) -> None:
        """Record the wait for a buffer, then laying out and sending a message."""
        self.recorder.span("buffer", self.stage, microbatch, begin_s, room_s, self.name)
        self.recorder.span("send", self.stage, microbatch, room_s, self.now(), self.name, num_bytes)
