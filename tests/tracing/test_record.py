"""The recorder, and a run's folder."""

import random
from pathlib import Path

import pytest

from penstock.errors import DataError, UsageError
from penstock.tracing.record import Alignment, Exchange, Reading, Recorder, Track, fit_clock, read_clock
from penstock.tracing.trace import ProcessTrace, RunFacts, Span, read_run, write_run


def ticking() -> float:
    """A clock that goes one second further each time it is read."""
    ticking.now += 1.0  # type: ignore[attr-defined]
    return float(ticking.now)  # type: ignore[attr-defined]


def test_track_records_waits_and_reads() -> None:
    ticking.now = 0.0  # type: ignore[attr-defined]
    recorder = Recorder(ticking)
    track = Track(recorder, 2, "B")
    track.took(7, begin_s=0.25, arrived_s=0.5, num_bytes=64)
    track.awaited(7, begin_s=2.0, room_s=2.0)
    track.gave(7, begin_s=2.0, num_bytes=32)
    assert [Span(*span) for span in recorder.spans] == [
        Span("wait", "B", 2, 7, 0.25, 0.5),
        Span("receive", "B", 2, 7, 0.5, 1.0, 64),
        Span("buffer", "B", 2, 7, 2.0, 2.0),
        Span("send", "B", 2, 7, 2.0, 2.0, 32),
    ]


def test_spans_beyond_the_limit_are_counted() -> None:
    recorder = Recorder(limit=2)
    for microbatch in range(5):
        recorder.span("compute", 0, microbatch, 0.0, 1.0)
    assert (len(recorder.spans), recorder.num_dropped) == (2, 3)
    recorder.clear()
    assert (recorder.spans, recorder.num_dropped) == ([], 0)


def test_memory_is_sampled_at_intervals() -> None:
    recorder = Recorder()
    for moment in (0.0, 0.01, 0.2, 0.21):
        recorder.sample(moment)
    assert [moment for _, moment, _ in recorder.counters] == [0.0, 0.2]
    assert all(2**20 < value < 2**40 for _, _, value in recorder.counters)


def facts() -> RunFacts:
    return RunFacts(kind="stream", model="Tiny", ranks=(1,), devices=("feeder", "board"))


def test_a_folder_is_read_on_one_clock(tmp_path: Path) -> None:
    late = ProcessTrace(rank=1, device="board", spans=(Span("compute", "F", 0, 0, 1.0, 2.0),),
                        alignment=Alignment(at_s=0.0, offset_s=100.0, drift=0.5))  # fmt: skip
    stale = ProcessTrace(rank=9, device="gone")
    write_run(tmp_path / "run", facts(), [stale])
    write_run(tmp_path / "run", facts(), [ProcessTrace(rank=0, device="feeder"), late])
    run = read_run(tmp_path / "run")
    assert run.facts == facts()
    assert [process.rank for process in run.processes] == [0, 1]
    assert [(span.begin_s, span.end_s) for span in run.spans] == [(101.5, 103.0)]


def test_invalid_trace_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run\.json not found"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(DataError, match="does not hold a valid run"):
        read_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        write_run(tmp_path / "file", facts(), [])


def ask(at_s: float, offset_s: float, drift: float, rng: random.Random, num: int = 16) -> Reading:
    """Ask a clock that shows `offset_s + t * (1 + drift)` over a network with waits of its own in each direction."""
    exchanges = []
    for _ in range(num):
        there, think, back = (rng.expovariate(1e4) for _ in range(3))
        received, answered = at_s + there, at_s + there + think
        exchanges.append(
            Exchange(at_s, offset_s + received * (1 + drift), offset_s + answered * (1 + drift), answered + back)
        )
        at_s = answered + back + 1e-3
    return read_clock(exchanges)


@pytest.mark.parametrize("offset_s", [-1000.0, 0.0, 2.5])
@pytest.mark.parametrize("drift", [-2e-4, 0.0, 5e-5])
def test_offset_and_drift_are_found_within_the_error(offset_s: float, drift: float) -> None:
    rng = random.Random(7)
    alignment = fit_clock([ask(begin, offset_s, drift, rng) for begin in (10.0, 610.0)])
    assert 0 < alignment.error_s < 1e-4
    for moment in (10.0, 200.0, 610.0):
        assert abs(alignment.align(offset_s + moment * (1 + drift)) - moment) <= alignment.error_s + 1e-6
    assert alignment.drift == pytest.approx(-drift, abs=1e-6)


def test_alignment_removes_a_drift() -> None:
    alignment = fit_clock([ask(begin, 3.0, 1e-4, random.Random(1)) for begin in (0.0, 100.0)])
    assert abs(3.0 + 100.01 - 100.0) > 3.0  # what the clocks differ by
    assert alignment.align(3.0 + 100.01) == pytest.approx(100.0, abs=1e-3)


def test_fastest_exchange_bounds_the_clock_error() -> None:
    slow, quick = Exchange(0.0, 5.9, 5.9, 1.0), Exchange(2.0, 7.01, 7.03, 2.06)
    assert read_clock([slow, quick]).offset_s == pytest.approx(2.03 - 7.02)
    assert read_clock([slow, quick]).error_s == pytest.approx(0.02)


def test_one_clock_reading_gives_an_offset() -> None:
    alignment = fit_clock([Reading(4.0, 1.5, 0.1)])
    assert (alignment.align(10.0), alignment.error_s) == (11.5, 0.1)
    assert Alignment().align(3.0) == 3.0
