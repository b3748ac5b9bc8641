"""Say why nothing fits: by how much it misses, on which device, and what would fit."""

import numpy as np

from penstock.plan.cost.problem import Problem
from penstock.plan.cost.stage_cost import Vector
from penstock.units import format_bytes

_KEEPING_MORE = {"gpipe", "interleaved", "zero-bubble"}


def explain_misfit(problem: Problem) -> str:
    """Return one line that says what is missing and how much memory per device would do.

    Example:
        raise PlanError(explain_misfit(problem))
    """
    devices = problem.devices
    largest = max(range(len(devices)), key=lambda number: devices[number].memory_bytes)
    need, unit = _neediest_unit(problem, largest)
    have = devices[largest].memory_bytes
    each = memory_that_would_do(problem)
    would = f"{format_bytes(_round_up(each))} on each of {len(devices)} devices would do"
    if need > have:
        names = [boundary.name for boundary in problem.profile.boundaries]
        return (
            f"the unit between {names[unit]} and {names[unit + 1]} alone needs {format_bytes(need)}, but the "
            f"largest memory is {format_bytes(have)} on {devices[largest].name}, {format_bytes(need - have)} too "
            f"little; {would}"
        )
    tightest = min(range(len(devices)), key=lambda number: devices[number].memory_bytes)
    missing = each - devices[tightest].memory_bytes
    total = float(problem.costs.held_bytes[0, problem.num_units])
    holds = ", with gradients and optimizer state," if problem.setting.trains else ""
    fewer = (
        ", or the schedule 1f1b, which keeps fewer microbatches" if problem.setting.schedule in _KEEPING_MORE else ""
    )
    have_all = sum(device.memory_bytes for device in devices)
    return (
        f"the model does not fit: it needs {format_bytes(total)}{holds} and what every process takes beside, the "
        f"devices have {format_bytes(have_all)} in all; {devices[tightest].name} has "
        f"{format_bytes(devices[tightest].memory_bytes)}, {format_bytes(max(missing, 0.0))} less than an equal part; "
        f"{would}, or use more devices or fewer rows per microbatch{fewer}"
    )


def memory_that_would_do(problem: Problem) -> float:
    """Return the smallest memory with which equal devices, as many as there are, could hold the model."""
    low, high = 0.0, max(problem.memory_bytes(problem.feeder, 0, problem.num_units, _in_flight(problem, 1)), 1.0)
    matrices = [_needs(problem, from_end) for from_end in range(1, min(len(problem.devices), problem.num_units) + 1)]
    high = min(high, float(matrices[0][0, problem.num_units]))
    for _ in range(40):
        middle = (low + high) / 2
        if _possible(matrices, middle):
            high = middle
        else:
            low = middle
    return high


def _needs(problem: Problem, from_end: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the memory of every stage on the feeder, which needs the most, infinite where it is empty."""
    costs, (first, last) = problem.costs, problem.terms(problem.feeder).memory
    need: Vector = costs.held_bytes + first[:, None] + last[None, :]
    need = need + _in_flight(problem, from_end) * (costs.kept_at_end_bytes[None, :] - costs.kept_bytes[:, None])
    need[np.tril_indices(problem.num_units + 1)] = np.inf
    return need


def _possible(needs: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]], memory_bytes: float) -> bool:
    """Return whether so many stages of this memory reach from the model's end to its start."""
    reached = np.zeros(len(needs[0]), dtype=np.bool_)
    reached[-1] = True
    for need in needs:
        fits = np.flatnonzero(need[:, reached].min(axis=1) <= memory_bytes)
        if 0 in fits:
            return True
        reached[fits] = True
    return False


def _neediest_unit(problem: Problem, number: int) -> tuple[float, int]:
    needs = [problem.memory_bytes(number, u, u + 1, _in_flight(problem, 1)) for u in range(problem.num_units)]
    return max(needs), needs.index(max(needs))


def _in_flight(problem: Problem, from_end: int) -> int:
    return problem.setting.in_flight(from_end)


def _round_up(num_bytes: float) -> float:
    """Return three digits that are enough when written down."""
    step = 10.0 ** max(0, len(str(int(num_bytes))) - 3)
    return float(np.ceil(num_bytes / step) * step)
