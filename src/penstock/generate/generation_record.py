"""Record of a traced generation, for a report: its microbatches and requests."""

import time

from penstock.engine.driver import DeployedPipeline
from penstock.engine.observer import StageReport, StreamReport
from penstock.engine.tracers import FeederTracer
from penstock.generate.lanes import Lanes, Step
from penstock.generate.request import Request
from penstock.tracing.trace import GenerationFacts, RequestTimes


class GenerationRecord:
    """The record of one traced stream; `requests` are those that have finished."""

    def __init__(self, pipeline: DeployedPipeline, tracer: FeederTracer, lanes: Lanes) -> None:
        self.report = StreamReport()
        self.requests: list[Request] = []
        self._pipeline, self._tracer, self._lanes = pipeline, tracer, lanes
        self._begin_s = time.perf_counter()
        self._microbatches: list[tuple[str, int]] = []

    def begin(self) -> tuple[float, float]:
        """Return the current time of the trace and of this thread's CPU, as the start of a microbatch's preparation."""
        return self._tracer.recorder.clock(), time.thread_time()

    def fed(self, step: Step, moment: tuple[float, float]) -> None:
        """Record a microbatch that was prepared since `moment`."""
        self._tracer.loaded(len(self._microbatches), *moment)
        kind = "prompt" if step.lane < 0 else "guess" if step.guesses else "step"
        self._microbatches.append((kind, step.lane))
        self.report.fed_s = time.perf_counter() - self._begin_s

    def took(self) -> None:
        """Record a result."""
        self.report.took(time.perf_counter() - self._begin_s)

    def end(self, stages: list[StageReport]) -> GenerationFacts:
        """Complete the report, with tokens as its rows, and return the facts of the generation."""
        self.report.stages = stages
        self.report.num_rows = sum(len(request.tokens) for request in self.requests)
        self._pipeline.traces = [self._tracer.own(), *self._pipeline.traces]
        return GenerationFacts(
            microbatches=tuple(self._microbatches), requests=tuple(map(self._times, self.requests)),
            num_slots=self._lanes.num_slots, num_guesses=self._lanes.num_guesses, num_right=self._lanes.num_right,
            cache_bytes=tuple(self._pipeline.cache_bytes),
        )  # fmt: skip

    def _times(self, request: Request) -> RequestTimes:
        return RequestTimes(
            num_prompt=len(request.prompt),
            num_reused=request.num_reused,
            asked_s=request.asked_s - self._begin_s,
            came_s=tuple(moment - self._begin_s for moment in request.came_s),
        )
