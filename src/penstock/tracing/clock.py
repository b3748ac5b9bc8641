"""Alignment of two clocks over a network: offset, drift, and their uncertainty.

    here    sent ─────────────────────────────── returned
                ╲                               ╱
    there        received ──────────── answered

If both ways take the same time, the other clock is ahead by the mean of (received - sent) and (answered - returned);
otherwise the error is at most half of the time on the way. Of many exchanges the fastest waited least and is used
(Mills 1991, the Network Time Protocol's clock filter).
"""

from collections.abc import Sequence

import msgspec


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
