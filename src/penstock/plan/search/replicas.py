"""Several whole pipelines side by side, each on its share of the microbatches."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.plan.cost.pipeline_cost import shared_load_s
from penstock.plan.cost.problem import Division, Problem
from penstock.plan.search.exact import best_divisions
from penstock.plan.search.large import good_division

# up to this many devices every way to divide them into groups is tried
MAX_PARTITIONED = 5
_MAX_GROUPS = 8
# each number of groups takes about as long as one pipeline of all devices: with many, only these are tried
_MANY = 64
_GROUPS_OF_MANY = (4, 8)
EFFORT = 200_000_000


def best_replicas(problem: Problem) -> list[tuple[float, tuple[Division, ...]]]:
    """Return good ways to run several pipelines at once, each with its microbatches per second in all.

    Up to five devices, every grouping is tried with the best pipeline for each group; beyond that, up to eight
    groups of equal strength (four or eight beyond 64 devices), and every device by itself. Devices that cannot
    take part are left out.
    The feeder feeds all pipelines first and computes with the time that is left.
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
    """Return the microbatches per second of each of several pipelines at once.

    Others come first: each microbatch costs the feeder the same wherever it goes, and its own pipeline its
    computing too.
    """
    elsewhere_s = problem.feeding_s(())
    rates = [1 / _own_bottleneck_s(problem, division) for division in divisions]
    mine = next((i for i, d in enumerate(divisions) if any(problem.feeder in stage.devices for stage in d)), None)
    others = sum(rate for index, rate in enumerate(rates) if index != mine)
    # neither the feeder's CPU nor its link hands over more than this
    given = min(others, 1 / max(elsewhere_s)) if max(elsewhere_s) else others
    rates = [rate if index == mine else rate * given / others for index, rate in enumerate(rates)]
    if mine is not None:
        stage = next(stage for stage in divisions[mine] if problem.feeder in stage.devices)
        own_s = problem.own_load_s(problem.feeder, stage) / len(stage.devices) + problem.feeding_s(divisions[mine])[0]
        rates[mine] = min(rates[mine], max(0.0, 1 - elsewhere_s[0] * given) / own_s)
    return rates


def _own_bottleneck_s(problem: Problem, division: Division) -> float:
    """Return the pace of a pipeline without what the feeder does for others."""
    pace = 0.0
    for stage in division:
        if len(stage.devices) > 1:
            pace = max(pace, shared_load_s(problem, stage))
            continue
        pace = max(pace, problem.own_load_s(stage.devices[0], stage))
    for one, other in pairwise(division):
        between = problem.byte_s(one.devices[0], other.devices[0])
        pace = max(pace, float(problem.costs.crossing[one.end]) * between)
    return pace


def _best_of(problem: Problem, group: tuple[int, ...]) -> Division | None:
    found = best_divisions(problem, numbers=group, effort=EFFORT)
    if found is None:
        return good_division(problem, group)
    return min(found.values(), key=lambda item: item[0], default=(0.0, None))[1]


def groupings(problem: Problem) -> Iterator[list[tuple[int, ...]]]:
    """Return ways to divide devices into groups, each for a pipeline: every one of up to five devices, some of more."""
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
    """Return groups of about equal strength, for several numbers of them; then every device that can hold it all."""
    order = sorted(range(len(problem.devices)), key=lambda number: -problem.devices[number].speed)
    numbers = range(2, min(_MAX_GROUPS, len(order)) + 1) if len(order) <= _MANY else _GROUPS_OF_MANY
    for num_groups in numbers:
        groups: list[list[int]] = [[] for _ in range(num_groups)]
        for number in order:
            # the weakest group takes the next device
            min(groups, key=lambda group: sum(problem.devices[n].speed for n in group)).append(number)
        yield [tuple(sorted(group)) for group in groups]
    yield [(number,) for number in order if problem.fits(number, 0, problem.num_units, problem.setting.in_flight(1))]
