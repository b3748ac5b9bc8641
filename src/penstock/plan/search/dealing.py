"""Pipelines whose stages are dealt out to devices in turns, for interleaved 1F1B: devices balanced, memory counted."""

from itertools import pairwise

import numpy as np

from penstock.plan.cost.problem import Division, Placed, Problem
from penstock.plan.cost.stage_cost import Vector
from penstock.plan.cost.step import devices_of
from penstock.plan.schedule.actions import Action
from penstock.plan.schedule.schedules import make_schedule
from penstock.plan.search.dealt import SLACK, deal

# stages of a device that are tried; more make the bubble smaller and the messages more
_STAGES_EACH = (2, 3)
# so many devices may also be used in part
_FEW = 12


def dealt_divisions(problem: Problem) -> list[Division]:
    """Return good pipelines with several stages for each device, for each number of devices, those that fit.

    Devices go in order, the fastest ones where not all are used; of more than a dozen all are. Memory is looked at once
    the cuts are chosen.

    Example:
        division = dealt_divisions(problem)[0]
    """
    fastest = sorted(range(len(problem.devices)), key=lambda number: -problem.devices[number].speed)
    found = []
    for num_devices in range(2 if len(fastest) <= _FEW else len(fastest), len(fastest) + 1):
        numbers = sorted(fastest[:num_devices])
        costs = {number: _costs(problem, number) for number in numbers}
        for each in _STAGES_EACH:
            holders = numbers * each
            if len(holders) > problem.num_units:
                continue
            dealt = deal([costs[number] for number in holders], list(range(num_devices)) * each, slack=SLACK)
            if dealt is None:
                continue
            bounds = pairwise((0, *dealt.cuts, problem.num_units))
            division = tuple(Placed((number,), a, b) for number, (a, b) in zip(holders, bounds, strict=True))
            needs = dealt_memory(problem, division)
            if all(need <= problem.devices[number].memory_bytes for number, need in needs.items()):
                found.append(division)
    return found


def dealt_memory(problem: Problem, division: Division) -> dict[int, float]:
    """Return the memory of each device that holds several stages.

    One process holds them all, and works on one at a time; what they keep is counted along the schedule.
    """
    costs, setting = problem.costs, problem.setting
    devices = devices_of(division)
    schedule = make_schedule(setting.schedule, len(division), setting.num_microbatches or 1, len(devices))
    needs = {}
    for device, actions in zip(devices, schedule, strict=True):
        first, last = problem.terms(device).memory
        own = [stage for stage in division if stage.devices == (device,)]
        process = float(first[-1] - costs.messages_bytes()[-1])
        messages = sum(float(first[stage.start] + last[stage.end]) - process for stage in own)
        working = [float(costs.working_bytes[stage.start, stage.end]) for stage in own]
        held = sum(float(costs.held_bytes[stage.start, stage.end]) for stage in own) - sum(working) + max(working)
        needs[device] = process + messages + held + _kept_bytes(problem, division, actions)
    return needs


def _kept_bytes(problem: Problem, division: Division, actions: tuple[Action, ...]) -> float:
    """Return the most that a device keeps for backwards at a time."""
    costs = problem.costs
    kept = most = 0.0
    for action in actions:
        stage = division[action.stage]
        change = float(costs.kept_at_end_bytes[stage.end] - costs.kept_bytes[stage.start])
        kept += change if action.kind == "F" else -change if action.kind in {"B", "W"} else 0.0
        most = max(most, kept)
    return most


def _costs(problem: Problem, number: int) -> Vector:
    """Return the seconds of every possible stage on a device, infinite where it is empty."""
    first, last = problem.path_terms(number)
    seconds: Vector = first[:, None] + last[None, :]
    seconds[np.tril_indices(problem.num_units + 1)] = np.inf
    return seconds
