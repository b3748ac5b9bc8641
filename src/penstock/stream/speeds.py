"""Observed speed of each device of a stream, from the counters in its heartbeats."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import TransportError

# observation window of a device's speed, and the minimum number of microbatches that the device runs within it
WINDOW_S = 5.0
MIN_MICROBATCHES = 4
# smaller changes are ignored: on shared cores speeds fluctuate by this much
CHANGE = 0.2
# uncertainty of costs that are counted from shapes: within this factor a device is considered as fast as planned
FAR = 1.6


@dataclass(frozen=True, slots=True)
class Count:
    """Number of microbatches that a device has run, and the seconds that it computed."""

    busy_s: float
    num_run: int


class ObservedSpeeds:
    """Observed speeds of the devices of deployed stages, window by window.

    `count` returns each device's counters by name, `expected_s` the seconds per microbatch at speed 1. The usual speed
    of a device is the first observed speed, unless that is far from the speed in `planned`, for which the deployed
    stages were planned. With `at_first` the first speeds count as a change, because all devices were assumed equal.

    Example:
        speeds = ObservedSpeeds(count, lambda: {"board0": 0.02, "board1": 0.02})
        if speeds.changed():
            plan = replanner.plan(names, speeds.now())
    """

    def __init__(
        self, count: Callable[[], Mapping[str, Count]], expected_s: Callable[[], Mapping[str, float]], *,
        planned: Mapping[str, float] | None = None, at_first: bool = False,
        clock: Callable[[], float] = time.monotonic, window_s: float = WINDOW_S,
    ) -> None:  # fmt: skip
        self._count, self._expected_s = count, expected_s
        self._clock, self._window_s = clock, window_s
        self._since_s: float | None = None
        self._before: Mapping[str, Count] = {}
        self._planned = dict(planned or {})
        self._usual: dict[str, float] = {}  # speeds last accepted
        self._speeds: dict[str, float] = {}  # speeds of the last window
        self._at_first = at_first

    def changed(self) -> bool:
        """Update the speeds; return True if a device became slower or faster since its speed was last accepted."""
        now_s = self._clock()
        if self._since_s is not None and now_s - self._since_s < self._window_s:
            return False
        try:
            counted = dict(self._count())
        except TransportError:  # an outdated heartbeat
            return False
        before, self._before, self._since_s = self._before, counted, now_s
        expected_s = self._expected_s() if before else {}
        for name, count in counted.items():
            started = before.get(name)
            num = count.num_run - started.num_run if started is not None else 0
            busy_s = count.busy_s - started.busy_s if started is not None else 0.0
            if num >= MIN_MICROBATCHES and busy_s > 0 and expected_s.get(name, 0.0) > 0:
                self._speeds[name] = expected_s[name] * num / busy_s
        for name, speed in self._speeds.items():
            planned = self._planned.get(name, speed)
            self._usual.setdefault(name, speed if 1 / FAR < speed / planned < FAR else planned)
        if self._at_first and self._speeds:
            self._at_first = False
            return True
        return any(abs(factor - 1) > CHANGE for factor in self._factors().values())

    def now(self) -> dict[str, float]:
        """Return the speed of each device in the last window; devices that were not observed are left out."""
        return dict(self._speeds)

    def accept(self) -> None:
        """Accept the current speeds as the usual ones."""
        self._usual = dict(self._speeds)

    def most_changed(self) -> tuple[str, float]:
        """Return the device whose speed has changed most, and the ratio to its usual speed."""
        factors = self._factors()
        name = max(factors, key=lambda each: max(factors[each], 1 / factors[each]))
        return name, factors[name]

    def _factors(self) -> dict[str, float]:
        return {name: speed / self._usual[name] for name, speed in self._speeds.items()}
