"""Reading another clock: offsets, drifts and waits put in, and got back within the error that is said."""

import random

import pytest

from penstock.tracing.clock import Alignment, Exchange, Reading, fit_clock, read_clock


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


def test_without_alignment_a_drift_would_show() -> None:
    alignment = fit_clock([ask(begin, 3.0, 1e-4, random.Random(1)) for begin in (0.0, 100.0)])
    assert abs(3.0 + 100.01 - 100.0) > 3.0  # what the clocks differ by
    assert alignment.align(3.0 + 100.01) == pytest.approx(100.0, abs=1e-3)


def test_the_quickest_exchange_counts_and_says_how_wrong_it_may_be() -> None:
    slow, quick = Exchange(0.0, 5.9, 5.9, 1.0), Exchange(2.0, 7.01, 7.03, 2.06)
    assert read_clock([slow, quick]).offset_s == pytest.approx(2.03 - 7.02)
    assert read_clock([slow, quick]).error_s == pytest.approx(0.02)


def test_one_reading_is_an_offset() -> None:
    alignment = fit_clock([Reading(4.0, 1.5, 0.1)])
    assert (alignment.align(10.0), alignment.error_s) == (11.5, 0.1)
    assert Alignment().align(3.0) == 3.0
