"""Comparison of runs: seconds of operators without those that they call."""

import pytest
from msgspec.structs import replace

from penstock.report.comparison import Compared, differences, loads, operators_of, own_seconds
from penstock.tracing.trace import Span
from tests.report.samples import streamed


def span(name: str, begin_s: float, end_s: float) -> Span:
    return Span("profile", name, 0, 0, begin_s, end_s)


def test_seconds_without_those_of_what_is_called() -> None:
    spans = [
        span("linear", 0.0, 10.0), span("transpose", 1.0, 2.0), span("addmm", 2.0, 9.0), span("copy", 3.0, 4.0),
        span("linear", 10.0, 12.0), span("addmm", 10.0, 12.0),
    ]  # fmt: skip
    found = [(each.name, seconds) for each, seconds in own_seconds(spans)]
    assert sorted(found) == [
        ("addmm", 2.0), ("addmm", 6.0), ("copy", 1.0), ("linear", 0.0), ("linear", 2.0), ("transpose", 1.0),
    ]  # fmt: skip
    assert sum(seconds for _, seconds in found) == 12.0


def test_tables_and_figures_have_one_statistic() -> None:
    """Every fourth microbatch takes longer, so means are not medians; the profiler slowed the first one down."""

    def step_of(_stage: int, microbatch: int) -> tuple[float, float]:
        seconds = 1.0 if microbatch == 0 else 0.02 if microbatch % 4 == 0 else 0.01
        return seconds, seconds

    run = streamed(num=9, compute_s=(0.01, 0.01), step_of=step_of)
    first, *others = run.processes
    seen = [replace(p, spans=(*p.spans, Span("profile", "mm", p.rank - 1, 0, 0.0, 1.0))) for p in others]
    run = replace(run, processes=(first, *seen))
    each = Compared("one", run)
    mean_s = (6 * 0.01 + 2 * 0.02) / 8
    assert each.of_all_stages("compute_s") == pytest.approx(2 * mean_s)
    assert ("computing per microbatch, sum of all stages", "25 ms") in differences([each]).rows
    assert [row[3] for row in loads([each]).table.rows] == ["12.5 ms", "12.5 ms"]
    assert operators_of(run, each.plain)["mm"].seconds == pytest.approx(2.0)
