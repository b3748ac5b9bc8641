"""What a traced generation did: its microbatches and requests, for a report."""

import time
from collections.abc import Sequence

from penstock.engine.observer import StageReport, StreamReport
from penstock.engine.place import Place
from penstock.generate.lanes import Lanes, Step
from penstock.generate.request import Request
from penstock.tracing.trace import GenerationFacts, RequestTimes


class GenerationRecord:
    """The record of one traced stream; `requests` are those that have ended."""

    def __init__(self, place: Place, lanes: Lanes) -> None:
        self.report = StreamReport()
        self.requests: list[Request] = []
        self._place, self._lanes = place, lanes
        self._begin_s = time.perf_counter()
        self._microbatches: list[tuple[str, int]] = []

    def begin(self) -> tuple[float, float]:
        """Return the moment at which a microbatch begins to be made."""
        return (self._place.tracer.recorder.clock() if self._place.tracer is not None else 0.0), time.thread_time()

    def fed(self, step: Step, moment: tuple[float, float]) -> None:
        """Record a microbatch that was made since a moment."""
        if self._place.tracer is not None:
            self._place.tracer.loaded(len(self._microbatches), *moment)
        kind = "prompt" if step.lane < 0 else "guess" if step.guesses else "step"
        self._microbatches.append((kind, step.lane))
        self.report.fed_s = time.perf_counter() - self._begin_s

    def took(self) -> None:
        """Record a result."""
        report = self.report
        report.results_s.append(time.perf_counter() - self._begin_s)
        report.num_microbatches = len(report.results_s)
        report.total_s, report.fill_s = report.results_s[-1], report.results_s[0]

    def end(self, stages: list[StageReport], cache_bytes: Sequence[int]) -> GenerationFacts:
        """Complete the report, whose rows are tokens, and return what the generation did."""
        self.report.stages = stages
        self.report.num_rows = sum(len(request.tokens) for request in self.requests)
        if self._place.tracer is not None:
            self._place.traces = [self._place.tracer.own(), *self._place.traces]
        return GenerationFacts(
            microbatches=tuple(self._microbatches), requests=tuple(map(self._times, self.requests)),
            num_slots=self._lanes.num_slots, num_guesses=self._lanes.num_guesses, num_right=self._lanes.num_right,
            cache_bytes=tuple(cache_bytes),
        )  # fmt: skip

    def _times(self, request: Request) -> RequestTimes:
        return RequestTimes(
            num_prompt=len(request.prompt),
            num_reused=request.num_reused,
            asked_s=request.asked_s - self._begin_s,
            came_s=tuple(moment - self._begin_s for moment in request.came_s),
        )
