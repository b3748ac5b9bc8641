"""What a pipeline costs: its bottleneck, its latency, and whether its devices hold it."""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.plan.cost.problem import Division, Placed, Problem
from penstock.plan.cost.stage_cost import Vector


def shared_load_s(problem: Problem, stage: Placed) -> float:
    """Return the pace of a stage: one device's load, or that of several that share it in proportion to speed.

    With the feeder among several, feeding comes first and it takes as many microbatches as it then can.
    """
    if len(stage.devices) == 1:
        return problem.load_s(stage.devices[0], stage.start, stage.end)
    rate, spent = 0.0, 0.0
    for number in stage.devices:
        own = problem.own_load_s(number, stage)
        rate += 1 / own
        if number == problem.feeder:
            # others take a part of its input and output, wherever this stage lies
            spent = problem.feeding_only_s() / own
    pace = (1 + spent) / rate
    if spent and pace <= problem.feeding_only_s() * (1 + 1e-9):
        return math.inf  # feeding leaves it no time: the stage is better off without it
    return pace


def shared_block(problem: Problem, members: list[tuple[int, int]], starts: slice, ends: slice) -> Vector:
    """Return the pace of stages that devices share: for each device its number, and how many are like it."""
    rate: Vector | float = 0.0
    spent: Vector | float = 0.0
    possible: NDArray[np.bool_] = np.ones(1, dtype=np.bool_)
    for number, times in members:
        terms = problem.terms(number)
        own = terms.own[0][0][starts, None] + terms.own[0][1][None, ends]
        for first, last in terms.own[1:]:
            np.maximum(own, first[starts, None] + last[None, ends], out=own)
        fits = problem.cost_block(number, 0, starts, ends) < np.inf
        possible = possible & fits
        # empty stages have no cost; they are left out by what is possible
        own = np.where(fits, own, 1.0)
        rate = rate + times / np.maximum(own, 1e-300)
        if number == problem.feeder:
            spent = problem.feeding_only_s() / np.maximum(own, 1e-300)
    if sum(times for _, times in members) == 1:
        return problem.cost_block(members[0][0], 0, starts, ends)
    pace = np.where(possible, (1 + spent) / rate, np.inf)
    if any(number == problem.feeder for number, _ in members):
        pace[pace <= problem.feeding_only_s() * (1 + 1e-9)] = np.inf
    return pace


def bottleneck_s(problem: Problem, division: Division) -> float:
    """Return the seconds between microbatches of a pipeline that runs full: its busiest device or link."""
    pace = max(shared_load_s(problem, stage) for stage in division)
    for one, other in pairwise(division):
        if len(one.devices) == len(other.devices) == 1:
            between = problem.byte_s(one.devices[0], other.devices[0])
            pace = max(pace, float(problem.costs.crossing[one.end]) * between)
    if not any(problem.feeder in stage.devices for stage in division):
        pace = max(pace, problem.feeding_only_s())
    return pace


def latency_s(problem: Problem, division: Division) -> float:
    """Return the seconds from feeding a microbatch into the empty pipeline until its result is there.

    Where devices share a stage, the slowest counts.
    """
    costs, feeder = problem.costs, problem.feeder
    total = costs.feeding_s / problem.devices[feeder].speed
    places = [(feeder,), *(stage.devices for stage in division), (feeder,)]
    bounds = [*(stage.start for stage in division), problem.num_units]
    for (senders, receivers), boundary in zip(pairwise(places), bounds, strict=True):
        total += max(
            problem.transfer_s(one, other, boundary) + problem.latency_s(one, other)
            for one in senders
            for other in receivers
        )
    for stage in division:
        total += max(problem.own_s(number, stage) for number in stage.devices)
    return total


def fits_all(problem: Problem, division: Division) -> bool:
    """Return whether every device of a pipeline has the memory for its stage."""
    return all(
        problem.fits(number, stage.start, stage.end, in_flight)
        for stage, in_flight in zip(division, problem.in_flight(division), strict=True)
        for number in stage.devices
    )
