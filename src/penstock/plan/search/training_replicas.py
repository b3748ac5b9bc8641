"""Whole pipelines side by side for training: which devices make one, and how many microbatches of a step each takes."""

import math
from collections.abc import Callable, Sequence
from functools import cache

from penstock.plan.cost.pipeline_cost import bottleneck_s, fits_all
from penstock.plan.cost.problem import Division, Problem
from penstock.plan.cost.training_step import play_step, simulate_step
from penstock.plan.search.exact import best_divisions
from penstock.plan.search.large import good_division
from penstock.plan.search.replicas import EFFORT, groupings

# beyond this a group has so many numbers of stages that only the fastest pipeline is tried
_MAX_GROUP = 5
# seconds for a number of microbatches
Seconds = Callable[[int], float]


def best_steps(problem: Problem) -> list[tuple[float, tuple[Division, ...], tuple[int, ...]]]:
    """Return good ways to train several pipelines at once: seconds of a step, pipelines, and their microbatches.

    Groups of devices are those of `groupings`, groups that are alike tried once. A group's pipeline is the one of
    those with the best pace for each number of stages that takes least for its microbatches. The microbatches of a
    step are divided so that the last pipeline is done as early as it can be.

    Example:
        step_s, divisions, counts = best_steps(problem)[0]
    """
    total = problem.setting.num_microbatches or 1
    search = _Groups(problem)
    found = []
    tried: set[object] = set()
    for groups in groupings(problem):
        alike = tuple(sorted(search.kind(group) for group in groups))
        if len(groups) < 2 or alike in tried:
            continue
        tried.add(alike)
        ways = [divisions for group in groups if (divisions := search.ways(group, len(groups)))]
        if len(ways) < 2:
            continue
        seconds = [search.seconds(divisions) for divisions in ways]
        counts = divide_microbatches(total, seconds)
        chosen = [(search.best(divisions, n), n) for divisions, n in zip(ways, counts, strict=True) if n]
        if len(chosen) < 2 or any(each(count) == math.inf for each, count in zip(seconds, counts, strict=True)):
            continue
        divisions, shared = tuple(d for d, _ in chosen), tuple(n for _, n in chosen)
        found.append((play_step(problem, divisions, shared).step_s, divisions, shared))
    return sorted(found, key=lambda item: item[0])


def divide_microbatches(total: int, seconds: Sequence[Seconds]) -> list[int]:
    """Divide microbatches so that the longest pipeline is as short as it can be; some may get none.

    `seconds` give what each pipeline takes for a number of microbatches, more for more. Starting from parts after
    their pace, microbatches move from the longest to where they end earlier, until none would: as functions that
    only rise have one such minimum, that is the best.

    >>> divide_microbatches(6, [lambda n: 1.0 * n, lambda n: 2.0 * n])
    [4, 2]
    """
    paces = [(each(total) - each(total // 2)) / (total - total // 2) for each in seconds]
    rates = [1 / max(pace, 1e-300) for pace in paces] if all(0 <= pace < math.inf for pace in paces) else []
    # a few less than after their pace, so that hardly one is too many
    counts = [int(max(0, total - 2 * len(rates)) * rate / sum(rates)) for rate in rates] or [0] * len(seconds)
    while sum(counts) < total:
        _add(counts, seconds)
    while True:
        longest = max(range(len(counts)), key=lambda i: seconds[i](counts[i]))
        before = seconds[longest](counts[longest])
        counts[longest] -= 1
        if _add(counts, seconds, below=before) is None:
            counts[longest] += 1
            return counts


def _add(counts: list[int], seconds: Sequence[Seconds], below: float | None = None) -> int | None:
    """Return one more microbatch to the pipeline that then ends first, if it ends below a limit."""
    ends = [each(count + 1) for each, count in zip(seconds, counts, strict=True)]
    first = min(range(len(ends)), key=ends.__getitem__)
    if below is not None and not ends[first] < below:
        return None
    counts[first] += 1
    return first


class _Groups:
    """The pipelines of groups of devices, each looked for once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.divisions = cache(self._divisions)
        self.makespan_s = cache(self._makespan_s)

    def kind(self, group: tuple[int, ...]) -> tuple[str, ...]:
        """Return what two groups have alike exactly if one may stand for the other."""
        return tuple(sorted(repr(self.problem.signature(number)) for number in group))

    def ways(self, group: tuple[int, ...], num_groups: int) -> tuple[Division, ...]:
        """Return pipelines of a group; what fits depends on how many of a step's microbatches it takes."""
        total = self.problem.setting.num_microbatches or 1
        counts = [-(-total // num_groups)]
        if len(group) <= _MAX_GROUP:
            counts += [1, max(1, total - num_groups + 1)]
        return tuple(dict.fromkeys(division for count in counts for division in self.divisions(group, count)))

    def seconds(self, divisions: tuple[Division, ...]) -> Seconds:
        """Return a function from microbatches to the seconds of the best of these pipelines, inf where none fits."""
        return lambda count: self.makespan_s(self.best(divisions, count), count) if count else 0.0

    def best(self, divisions: tuple[Division, ...], count: int) -> Division:
        """Return the pipeline that takes least for `count` microbatches."""
        return min(divisions, key=lambda division: self.makespan_s(division, count))

    def _makespan_s(self, division: Division, count: int) -> float:
        if not fits_all(self.problem.for_replica(count), division):
            return math.inf
        return simulate_step(self.problem, division, count).makespan_s

    def _divisions(self, group: tuple[int, ...], num_microbatches: int) -> tuple[Division, ...]:
        problem = self.problem.for_replica(num_microbatches)
        found = best_divisions(problem, numbers=group, effort=EFFORT)
        if found is None:
            division = good_division(problem, group)
            return (division,) if division else ()
        divisions = [division for _, division in found.values()]
        if len(group) > _MAX_GROUP and divisions:
            return (min(divisions, key=lambda division: bottleneck_s(problem, division)),)
        return tuple(divisions)
