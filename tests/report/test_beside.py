"""Runs beside each other: seconds of operators without those that they call."""

from penstock.report.beside import own_seconds
from penstock.tracing.trace import Span


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
