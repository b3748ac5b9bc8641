"""The recorder, and a run's folder."""

from pathlib import Path

import pytest

from penstock.errors import DataError, UsageError
from penstock.tracing.clock import Alignment
from penstock.tracing.record import Recorder, Track
from penstock.tracing.trace import ProcessTrace, RunFacts, Span, read_run, write_run


def ticking() -> float:
    """A clock that goes one second further each time it is read."""
    ticking.now += 1.0  # type: ignore[attr-defined]
    return float(ticking.now)  # type: ignore[attr-defined]


def test_a_track_records_waiting_and_reading() -> None:
    ticking.now = 0.0  # type: ignore[attr-defined]
    recorder = Recorder(ticking)
    track = Track(recorder, 2, "B")
    track.took(7, begin_s=0.25, arrived_s=0.5, num_bytes=64)
    track.gave(7, begin_s=2.0, room_s=2.0, num_bytes=32)
    assert [Span(*span) for span in recorder.spans] == [
        Span("wait", "B", 2, 7, 0.25, 0.5),
        Span("receive", "B", 2, 7, 0.5, 1.0, 64),
        Span("buffer", "B", 2, 7, 2.0, 2.0),
        Span("send", "B", 2, 7, 2.0, 2.0, 32),
    ]


def test_what_does_not_fit_is_counted() -> None:
    recorder = Recorder(limit=2)
    for microbatch in range(5):
        recorder.span("compute", 0, microbatch, 0.0, 1.0)
    assert (len(recorder.spans), recorder.num_dropped) == (2, 3)
    recorder.clear()
    assert (recorder.spans, recorder.num_dropped) == ([], 0)


def test_memory_is_sampled_now_and_then() -> None:
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


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run\.json not found"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(DataError, match="does not hold a valid run"):
        read_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        write_run(tmp_path / "file", facts(), [])
