"""Traces of workers with clocks of their own, brought to the feeding process's clock."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.engine.tracers import FeederTracer, StageTracer
from penstock.errors import PenstockError
from penstock.report.page.chrome import chrome_trace
from penstock.tracing.trace import ProcessTrace, Run, RunFacts, Span
from tests.report.test_chrome import check_format
from tests.worlds import Divided, MemoryWorld, divided_tower, memory_world, poison, tower_inputs


@pytest.fixture(scope="module")
def halves() -> Divided:
    return divided_tower(2)


def skewed(offset_s: float, drift: float) -> Callable[[], float]:
    """A clock that is off by so much now, and by more with every second."""
    begin_s = time.perf_counter()
    return lambda: offset_s + time.perf_counter() + drift * (time.perf_counter() - begin_s)


def stream(
    halves: Divided, made: MemoryWorld, *, units: bool = False, profile: bool = False, num: int = 6
) -> list[ProcessTrace]:
    tracer = FeederTracer(made.feeder, units=units, profile=profile)
    deployment = halves.deploy(made.feeder, tracer=tracer)
    for _ in range(2):  # the second stream's trace holds nothing of the first one's
        inputs = tower_inputs(num)
        results = list(deployment.stream((list(x), {"batch": 2}) for x in inputs))
        assert all(torch.equal(a[0], halves.model(*x)) for a, x in zip(results, inputs, strict=True))
    traces = [trace if isinstance(trace, ProcessTrace) else trace.unpacked() for trace in deployment.traces]
    deployment.close()
    return traces


def test_clocks_that_are_off_and_drift_are_aligned(halves: Divided) -> None:
    with memory_world(2) as made:
        made.workers[0].clock = skewed(-500.0, 0.02)
        made.workers[1].clock = skewed(+3e4, -0.01)
        traces = stream(halves, made)
    assert [trace.rank for trace in traces] == [0, 1, 2]
    for trace, offset, drift in ((traces[1], 500.0, -0.02), (traces[2], -3e4, 0.01)):
        assert trace.alignment.offset_s == pytest.approx(offset, abs=1.0)
        assert trace.alignment.drift == pytest.approx(drift, abs=5e-3)
        assert 0 < trace.alignment.error_s < 0.05
        assert len(trace.readings) == 2
    spans = [span for trace in traces for span in trace.aligned().spans if span.kind == "compute"]
    slack = sum(trace.alignment.error_s for trace in traces)
    for microbatch in range(6):
        ways = sorted((s for s in spans if s.microbatch == microbatch), key=lambda s: s.stage)
        assert [span.stage for span in ways] == [0, 1]
        assert all(b.begin_s >= a.end_s - slack for a, b in pairwise(ways)), "a stage began before its input was made"
    naive = [span for trace in traces for span in trace.spans if span.kind == "compute"]
    assert max(s.begin_s for s in naive) - min(s.begin_s for s in naive) > 1e4


def test_every_message_and_every_computation_is_there(halves: Divided) -> None:
    with memory_world(2) as made:
        traces = stream(halves, made)

    def found(kind: str, stage: int) -> list[Span]:
        spans = [span for trace in traces for span in trace.spans if (span.kind, span.stage) == (kind, stage)]
        return [span for span in spans if span.microbatch < 6]  # behind them comes the end of the stream

    for stage in (0, 1):
        for kind in ("wait", "receive", "compute", "send"):
            assert [span.microbatch for span in found(kind, stage)] == list(range(6)), (kind, stage)
    assert [span.microbatch for span in found("load", -1)] == list(range(6))
    assert all(span.num_bytes > 0 for span in found("receive", 1))
    assert [a.num_bytes for a in found("send", 0)] == [b.num_bytes for b in found("receive", 1)]
    assert not [span for trace in traces for span in trace.spans if span.end_s < span.begin_s]
    for trace in traces[1:]:
        assert [alone.stage for alone in trace.alone] == [trace.rank - 1]
        assert trace.alone[0].seconds > 0
        assert trace.machine.calibration_s > 0 < trace.machine.byte_s
        assert {counter.name for counter in trace.counters} == {"memory_bytes"}


def test_units_on_request(halves: Divided) -> None:
    with memory_world(2) as made:
        traces = stream(halves, made, units=True, num=2)
    units = [span for span in traces[1].spans if span.kind == "unit" and span.microbatch == 0]
    (compute,) = (span for span in traces[1].spans if span.kind == "compute" and span.microbatch == 0)
    assert {span.name for span in units} == {op.name for op in halves.programs[0][0].ops}
    assert sum(span.seconds for span in units) <= compute.seconds


def test_the_profilers_operations_lie_within_their_computation(halves: Divided) -> None:
    with memory_world(2) as made:
        made.workers[1].clock = skewed(3e4, 0.0)
        traces = [trace.aligned() for trace in stream(halves, made, profile=True, num=8)]
    facts = RunFacts(kind="stream", model="tower", ranks=(1, 2), devices=tuple(made.feeder.names), num_microbatches=8)
    document = chrome_trace(Run(facts, tuple(traces)))
    check_format(document)
    found = [event for event in document["traceEvents"] if event.get("cat") == "profile"]
    assert {event["args"]["microbatch"] for event in found} <= set(range(2, 6)), "the window is bounded"
    assert {"aten::linear", "aten::embedding"} <= {event["name"] for event in found}
    assert any(event["args"].get("shapes") == "2x8 8x8 8" for event in found if event["name"] == "aten::linear")
    assert any(event["args"].get("bytes", 0) > 0 for event in found)
    around = {
        (event["tid"], event["args"]["microbatch"]): event
        for event in document["traceEvents"]
        if event.get("cat") == "compute"
    }
    for event in found:
        whole = around[event["tid"], event["args"]["microbatch"]]
        assert whole["ts"] - 1 <= event["ts"] <= event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 1


def test_recording_stops_on_request(halves: Divided, monkeypatch: pytest.MonkeyPatch) -> None:
    make = StageTracer.__init__

    def silent(tracer: StageTracer, *args: Any, **options: Any) -> None:
        make(tracer, *args, **options)
        tracer.record(False)

    monkeypatch.setattr(StageTracer, "__init__", silent)
    with memory_world(2) as made:
        traces = stream(halves, made)
    assert [trace.spans for trace in traces[1:]] == [(), ()]
    assert traces[0].spans, "the feeding process goes on"


def test_a_stream_that_fails_leaves_no_trace_and_does_not_hang(halves: Divided) -> None:
    with memory_world(2) as made:
        deployment = halves.deploy(made.feeder, tracer=FeederTracer(made.feeder))
        inputs = [*tower_inputs(2), poison(tower_inputs(1)[0], 5)]
        with pytest.raises(PenstockError, match="operation embedding"):
            list(deployment.stream((list(x), {"batch": 2}) for x in inputs))
        assert deployment.traces == []
        deployment.abandon()
