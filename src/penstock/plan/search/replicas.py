"""Parallel pipelines, each with its share of the microbatches of a stream or a step."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise

from penstock.plan.cost.problem import Division, Problem, bottleneck_s, fits_all
from penstock.plan.cost.training_step import play_step, simulate_step
from penstock.plan.search.exact import best_divisions
from penstock.plan.search.large import good_division

# up to this many devices, every division into groups is tried
MAX_PARTITIONED = 5
_MAX_GROUPS = 8
# each number of groups takes about as long as a search for one pipeline of all devices: with many devices, only these
# numbers are tried
_MANY = 64
_GROUPS_OF_MANY = (4, 8)
EFFORT = 200_000_000


def best_replicas(problem: Problem) -> list[tuple[float, tuple[Division, ...]]]:
    """Return good sets of parallel pipelines, with the total microbatches per second of each set.

    With up to five devices, every grouping is tried, with the best pipeline for each group. With more devices, up to
    eight groups of equal strength are tried (four or eight with more than 64 devices), and every device alone. Devices
    that cannot hold a stage are left out. The driver serves all pipelines first, and computes in its remaining time.
    """
    known: dict[tuple[int, ...], Division | None] = {}
    found: list[tuple[float, tuple[Division, ...]]] = []
    for groups in groupings(problem):
        divisions = []
        for group in groups:
            if group not in known:
                known[group] = _best_of(problem, group)
            division = known[group]
            if division is not None:
                divisions.append(division)
        if len(divisions) > 1:
            found.append((sum(rates_of(problem, divisions)), tuple(divisions)))
    return sorted(found, key=lambda item: -item[0])


def rates_of(problem: Problem, divisions: Sequence[Division]) -> list[float]:
    """Return the microbatches per second of each of several parallel pipelines.

    Other pipelines have priority: a microbatch costs the driver the same for any pipeline, but its own pipeline also
    costs computation.
    """
    elsewhere_s = problem.feeding_s(())
    rates = [1 / _own_bottleneck_s(problem, division) for division in divisions]
    mine = next((i for i, d in enumerate(divisions) if any(stage.device == problem.feeder for stage in d)), None)
    others = sum(rate for index, rate in enumerate(rates) if index != mine)
    # limit of the driver's CPU and link
    given = min(others, 1 / max(elsewhere_s)) if max(elsewhere_s) else others
    rates = [rate if index == mine else rate * given / others for index, rate in enumerate(rates)]
    if mine is not None:
        stage = next(stage for stage in divisions[mine] if stage.device == problem.feeder)
        own_s = problem.own_load_s(problem.feeder, stage) + problem.feeding_s(divisions[mine])[0]
        rates[mine] = min(rates[mine], max(0.0, 1 - elsewhere_s[0] * given) / own_s)
    return rates


def _own_bottleneck_s(problem: Problem, division: Division) -> float:
    """Return the pace of a pipeline without the driver's work for others."""
    stages = [problem.own_load_s(stage.device, stage) for stage in division]
    links = [
        float(problem.costs.crossing[one.end]) * problem.byte_s(one.device, other.device)
        for one, other in pairwise(division)
    ]
    return max([*stages, *links])


def _best_of(problem: Problem, group: tuple[int, ...]) -> Division | None:
    found = best_divisions(problem, numbers=group, effort=EFFORT)
    if found is None:
        return good_division(problem, group)
    return min(found.values(), key=lambda item: item[0], default=(0.0, None))[1]


def groupings(problem: Problem) -> Iterator[list[tuple[int, ...]]]:
    """Return divisions of the devices into groups, one per pipeline: all divisions of up to five devices, else some."""
    numbers = range(len(problem.devices))
    return _partitions(numbers) if len(numbers) <= MAX_PARTITIONED else _equal_groups(problem)


def _partitions(numbers: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Return every way to divide devices into groups."""
    if not numbers:
        yield []
        return
    first, rest = numbers[0], numbers[1:]
    for groups in _partitions(rest):
        yield [(first,), *groups]
        for index, group in enumerate(groups):
            yield [*groups[:index], (first, *group), *groups[index + 1 :]]


def _equal_groups(problem: Problem) -> Iterator[list[tuple[int, ...]]]:
    """Return groups of about equal strength, for several numbers of groups; then single devices that hold the model."""
    order = sorted(range(len(problem.devices)), key=lambda number: -problem.speeds[number])
    numbers = range(2, min(_MAX_GROUPS, len(order)) + 1) if len(order) <= _MANY else _GROUPS_OF_MANY
    for num_groups in numbers:
        groups: list[list[int]] = [[] for _ in range(num_groups)]
        for number in order:
            # the weakest group takes the next device
            min(groups, key=lambda group: sum(problem.speeds[n] for n in group)).append(number)
        yield [tuple(sorted(group)) for group in groups]
    yield [(number,) for number in order if problem.fits(number, 0, problem.num_units, problem.setting.in_flight(1))]


# larger groups have too many possible numbers of stages, so only the fastest pipeline is tried
_MAX_GROUP = 5
# returns the seconds for a number of microbatches
Seconds = Callable[[int], float]


def best_steps(problem: Problem) -> list[tuple[float, tuple[Division, ...], tuple[int, ...]]]:
    """Return good sets of parallel pipelines for training: seconds per step, pipelines, and their microbatches.

    Groups of devices come from `groupings`; equal groups are tried once. For each group, the pipeline with the best
    pace is found for each number of stages, and the fastest of these for its microbatches is used. The microbatches of
    a step are divided so that the last pipeline finishes as early as possible.

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
    """Divide microbatches so that the slowest pipeline takes as little time as possible; some may get none.

    `seconds` returns each pipeline's time for a number of microbatches, and must be increasing. Starting from parts
    proportional to pace, microbatches move from the slowest pipeline to a pipeline that then ends earlier, as long as
    there is one: for increasing functions this minimum is unique, so the result is optimal.

    >>> divide_microbatches(6, [lambda n: 1.0 * n, lambda n: 2.0 * n])
    [4, 2]
    """
    paces = [(each(total) - each(total // 2)) / (total - total // 2) for each in seconds]
    rates = [1 / max(pace, 1e-300) for pace in paces] if all(0 <= pace < math.inf for pace in paces) else []
    # slightly less than proportional to pace, so that hardly any pipeline starts with too many
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
    """Add a microbatch to the pipeline that then ends first, if it ends below a limit; return its index."""
    ends = [each(count + 1) for each, count in zip(seconds, counts, strict=True)]
    first = min(range(len(ends)), key=ends.__getitem__)
    if below is not None and not ends[first] < below:
        return None
    counts[first] += 1
    return first


class _Groups:
    """The pipelines of groups of devices, each searched once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.divisions = cache(self._divisions)
        self.makespan_s = cache(self._makespan_s)

    def kind(self, group: tuple[int, ...]) -> tuple[str, ...]:
        """Return a key that two groups have in common exactly if they are interchangeable."""
        return tuple(sorted(repr(self.problem.signature(number)) for number in group))

    def ways(self, group: tuple[int, ...], num_groups: int) -> tuple[Division, ...]:
        """Return the pipelines of a group; which of them fit depends on its number of microbatches."""
        total = self.problem.setting.num_microbatches or 1
        counts = [-(-total // num_groups)]
        if len(group) <= _MAX_GROUP:
            counts += [1, max(1, total - num_groups + 1)]
        return tuple(dict.fromkeys(division for count in counts for division in self.divisions(group, count)))

    def seconds(self, divisions: tuple[Division, ...]) -> Seconds:
        """Return a function from microbatches to the seconds of the best of these pipelines; inf if none fits."""
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
