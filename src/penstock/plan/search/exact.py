"""Exact search for the best pipeline, by dynamic programming over sets of devices and boundaries.

    best[devices S, boundary a]  =  min over the device d of S that goes first, and where its stage ends, b, of
                                    max( cost of a..b on d,  link from d to the next,  best[S without d, b] )

from the end of the model to its start, so that the number of later stages is known, and with it the microbatches that a
stage keeps in training. Equal devices form a kind, and S has the number of devices of each kind, so equal devices add
linearly to the states, not exponentially. If two devices have a separate link, S also has the first device. The same
recurrence with a sum instead of the max minimizes latency.

The result is exact: it covers every order of every selection of devices with every division into stages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Literal

import numpy as np

from penstock.plan.cost.problem import Division, Placed, Problem
from penstock.plan.cost.stage_cost import Vector

# maximum number of stages that a search considers; a billion take some seconds
EFFORT = 2_000_000_000
# overhead of a step of the recurrence, as a number of stages
_STEP = 30_000

Aim = Literal["pace", "latency"]
_State = tuple[int, ...]
_Key = tuple[_State, int]


@dataclass(frozen=True, slots=True)
class _Window:
    """Values from boundary `start` on; infinite before and after."""

    start: int
    values: Vector

    @property
    def span(self) -> slice:
        """Boundaries that have values."""
        return slice(self.start, self.start + len(self.values))


def best_divisions(
    problem: Problem,
    *,
    aim: Aim = "pace",
    at_most_s: float = math.inf,
    effort: int = EFFORT,
    numbers: Sequence[int] | None = None,
) -> dict[int, tuple[float, Division]] | None:
    """Return the best pipeline for each number of devices, with its pace or latency in seconds.

    Pipelines slower than `at_most_s` are left out. Returns None if the search would consider more than `effort` stages.
    `numbers` are the usable devices, by default all.

    Example:
        value_s, division = best_divisions(problem)[4]
    """
    return _Search(problem, aim, at_most_s, range(len(problem.devices)) if numbers is None else numbers).run(effort)


class _Search:
    def __init__(self, problem: Problem, aim: Aim, at_most_s: float, numbers: Sequence[int]) -> None:
        self.problem = problem
        self.aim = aim
        self.at_most_s = at_most_s
        kinds: dict[tuple[object, ...], list[int]] = {}
        for number in numbers:
            kinds.setdefault(problem.signature(number), []).append(number)
        self.kinds = list(kinds.values())
        self.counts = tuple(len(kind) for kind in self.kinds)
        # without separate links the sending device of a message is irrelevant
        self.uniform = not problem.cluster.links and aim == "pace"
        self.speeds = problem.speeds[[kind[0] for kind in self.kinds]]
        self.seconds = problem.costs.seconds
        self.table: dict[_Key, _Window] = {}

    def run(self, effort: int) -> dict[int, tuple[float, Division]] | None:
        if self._least_effort() > effort:
            return None
        for state in self._states():
            for kind, count in enumerate(self.counts):
                if state[kind] == count:
                    continue
                effort -= self._add(state, kind)
                if effort < 0:
                    return None
        return self._results()

    def _least_effort(self) -> int:
        """Return a lower bound on the effort: without a limit on the pace, nearly every step considers all stages."""
        steps = math.prod(count + 1 for count in self.counts) * len(self.counts) // 2
        bounded = self.aim == "pace" and self.at_most_s < math.inf
        return steps * (_STEP if bounded else _STEP + self.problem.num_units**2 // 2)

    def _states(self) -> list[_State]:
        """Return all selections of devices, smaller selections first."""
        return sorted(product(*(range(count + 1) for count in self.counts)), key=lambda state: (sum(state), state))

    def _lasts(self, state: _State) -> list[int]:
        """Return the kinds that may be first in a selection; irrelevant if links are equal."""
        return [-1] if self.uniform else [kind for kind, used in enumerate(state) if used]

    def _following(self, state: _State, kind: int) -> _Window | None:
        """Return the best values of the later stages, for each boundary at which a stage on this kind may end."""
        if not any(state):
            end = np.zeros(1)
            if self.aim == "latency":
                end[0] = self._hop_s(kind, None, slice(self.problem.num_units, None))[0]
            return _Window(self.problem.num_units, end)
        found = [(window, last) for last in self._lasts(state) if (window := self.table.get((state, last))) is not None]
        if not found:
            return None
        if self.uniform:
            return found[0][0]
        windows = []
        for window, last in found:
            if self.aim == "latency":
                values = window.values + self._hop_s(kind, last, window.span)
            else:
                byte_s = self.problem.byte_s(*self._two(kind, last))
                values = np.maximum(window.values, self.problem.costs.crossing[window.span] * byte_s)
            windows.append(_Window(window.start, values))
        return reduce(_merge, windows)

    def _two(self, kind: int, last: int) -> tuple[int, int]:
        """Return two different devices of these kinds."""
        first = self.kinds[kind][0]
        return first, self.kinds[last][1 if kind == last else 0]

    def _hop_s(self, kind: int, last: int | None, span: slice) -> Vector:
        """Return the seconds of a message from one kind to another, or from the last stage to the driver."""
        problem = self.problem
        one, other = (self.kinds[kind][0], problem.feeder) if last is None else self._two(kind, last)
        return problem.costs.crossing[span] * problem.wire_s(one, other) + problem.latency_s(one, other)

    def _add(self, state: _State, kind: int) -> int:
        """Add a stage on a kind of device before a selection; return the number of stages considered."""
        following = self._following(state, kind)
        if following is None:
            return 0
        target = _changed(state, kind, 1)
        left = tuple(count - used for count, used in zip(self.counts, target, strict=True))
        starts = self._possible_starts(left, following.span.stop - 1)
        if starts.start >= starts.stop:
            return 0
        values = self._values(state, kind, starts, following).min(axis=1)
        values[values > self.at_most_s] = np.inf
        finite = np.flatnonzero(values < np.inf)
        if len(finite):
            window = _Window(starts.start + int(finite[0]), values[finite[0] : finite[-1] + 1])
            key = (target, -1 if self.uniform else kind)
            known = self.table.get(key)
            self.table[key] = window if known is None else _merge(known, window)
        return _STEP + int(starts.stop - starts.start) * len(following.values)

    def _possible_starts(self, left: _State, last: int) -> slice:
        """Return the starts that leave no more work than the remaining devices can do within the limit."""
        if self.aim == "latency" or self.at_most_s == math.inf:
            return slice(0, last)
        able = self.at_most_s * (1 + 1e-9) * float(self.speeds @ np.array(left))
        return slice(0, min(last, int(np.searchsorted(self.seconds, able, side="right"))))

    def _values(self, state: _State, kind: int, starts: slice, following: _Window) -> Vector:
        """Return the value for every start (rows) and end (columns) of a stage before a selection."""
        block = self._block(kind, self.problem.setting.in_flight(sum(state) + 1), starts, following.span)
        if self.aim == "pace":
            return np.maximum(block, following.values)
        first, last = self.problem.path_terms(self.kinds[kind][0])
        path = first[starts, None] + last[None, following.span] + following.values
        if starts.start == 0 and starts.stop > 0:
            # a message from the driver takes as long as a message back to it
            path[0] += self._hop_s(kind, None, slice(0, 1))[0]
        return np.where(block < np.inf, path, np.inf)

    def _block(self, kind: int, in_flight: int, starts: slice, ends: slice) -> Vector:
        """Return the costs of stages on a kind of device."""
        problem, number = self.problem, self.kinds[kind][0]
        if problem.num_units <= 500:
            return problem.cost_matrix(number, in_flight)[starts, ends]
        return problem.cost_block(number, in_flight, starts, ends)

    def _results(self) -> dict[int, tuple[float, Division]]:
        best: dict[int, tuple[float, _State, int]] = {}
        feeder = next((kind for kind, numbers in enumerate(self.kinds) if self.problem.feeder in numbers), None)
        for (state, last), window in self.table.items():
            if window.start > 0:
                continue
            value = float(window.values[0])
            if self.aim == "latency":
                value += self.problem.costs.feeding_s / self.problem.devices[self.problem.feeder].speed
            elif feeder is None or not state[feeder]:
                value = max(value, self.problem.feeding_only_s())
            size = sum(state)
            if value <= self.at_most_s and (size not in best or value < best[size][0]):
                best[size] = (value, state, last)
        return {size: (value, self._trace(state, last)) for size, (value, state, last) in sorted(best.items())}

    def _trace(self, state: _State, last: int) -> Division:
        """Reconstruct the choices that led to the best value, from the model's start to its end."""
        free = [list(kind) for kind in self.kinds]
        stages: list[Placed] = []
        start = 0
        while start < self.problem.num_units:
            best: tuple[float, int, int] | None = None
            for kind, used in enumerate(state):
                if not used or (last >= 0 and kind != last):
                    continue
                rest = _changed(state, kind, -1)
                following = self._following(rest, kind)
                if following is None:
                    continue
                values = self._values(rest, kind, slice(start, start + 1), following)[0]
                place = int(values.argmin())
                if best is None or values[place] < best[0]:
                    best = (float(values[place]), kind, following.start + place)
            if best is None:
                raise AssertionError("the table does not lead back to its start")
            _, kind, end = best
            state, device = _changed(state, kind, -1), free[kind].pop(0)
            stages.append(Placed(device, start, end))
            start = end
            last = self._next_kind(state, device, end)
        return tuple(stages)

    def _next_kind(self, state: _State, device: int, end: int) -> int:
        """Return the next kind if links differ: the kind with the best value after this device."""
        if self.uniform or not any(state):
            return -1
        kind = next(k for k, numbers in enumerate(self.kinds) if device in numbers)
        best, chosen = math.inf, -1
        for last in self._lasts(state):
            window = self.table.get((state, last))
            if window is None or not window.start <= end < window.span.stop:
                continue
            value = float(window.values[end - window.start])
            if self.aim == "latency":
                value += float(self._hop_s(kind, last, slice(end, end + 1))[0])
            else:
                value = max(
                    value, float(self.problem.costs.crossing[end]) * self.problem.byte_s(*self._two(kind, last))
                )
            if value < best:
                best, chosen = value, last
        return chosen


def _changed(state: _State, kind: int, by: int) -> _State:
    """Return a selection with more or fewer devices of a kind."""
    return (*state[:kind], state[kind] + by, *state[kind + 1 :])


def _merge(one: _Window, other: _Window) -> _Window:
    start = min(one.start, other.start)
    stop = max(one.span.stop, other.span.stop)
    values = np.full(stop - start, np.inf)
    for window in (one, other):
        part = values[window.start - start : window.span.stop - start]
        np.minimum(part, window.values, out=part)
    return _Window(start, values)
