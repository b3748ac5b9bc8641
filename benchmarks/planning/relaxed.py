"""How much of a plan's gap on many devices is the bound's: `python -m benchmarks.planning.relaxed --json FILE`.

A linear program divides the model among fractions of stages: at a pace, any stage that a device does in time may be
taken by any part, each unit is covered once, and each device is used once at most. Where that is possible, only the
search stands between a plan and the pace, but for fractions; where it is not, no plan has the pace. Devices are
taken in classes of similar speed, each as able as the ablest of its class, so that the program stays small.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse  # type: ignore[import-untyped]
from scipy.optimize import linprog  # type: ignore[import-untyped]

from benchmarks.planning.__main__ import environment
from benchmarks.planning.instances import transformer, unequal_devices
from penstock.plan.cost.problem import Problem, bottleneck_bound_s, bottleneck_s
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.search.large import good_division

UNITS, DEVICES, CLASSES = 2000, 1000, 60
_LONGEST = 12  # units of a stage; those of the plan have five at most
_RATIOS = (1.0, 1.05, 1.1, 1.2)

_Loads = list[NDArray[np.float64]]


def main() -> None:
    """Plan, and ask at which paces fractions of stages would do."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning.relaxed")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--classes", type=int, default=CLASSES)
    given = parser.parse_args()
    problem = Problem(transformer(UNITS, seed=UNITS), unequal_devices(DEVICES, seed=DEVICES), Setting())
    bound = bottleneck_bound_s(problem)
    division = good_division(problem)
    if division is None:
        raise SystemExit("no plan was found")
    groups = np.array_split(np.argsort(problem.speeds), given.classes)
    loads = [least_loads(problem, [int(number) for number in group]) for group in groups]
    covered = {ratio: covered_part(problem, groups, loads, bound * ratio) for ratio in _RATIOS}
    result = {
        "units": UNITS, "devices": DEVICES, "classes": given.classes, "environment": environment(),
        "plan_over_bound": bottleneck_s(problem, division) / bound - 1, "stages": len(division),
        "longest_stage": max(stage.end - stage.start for stage in division), "covered": covered,
    }  # fmt: skip
    given.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def least_loads(problem: Problem, numbers: Sequence[int]) -> _Loads:
    """Return the least that any of some devices takes for each stage: by its number of units, then by its start."""
    found: _Loads = []
    for length in range(1, _LONGEST + 1):
        starts = np.arange(problem.num_units - length + 1)
        found.append(np.min([
            np.max([first[starts] + last[starts + length] for first, last in problem.terms(number).own], axis=0)
            for number in numbers
        ], axis=0))  # fmt: skip
    return found


def covered_part(problem: Problem, groups: Sequence[NDArray[np.intp]], loads: Sequence[_Loads], pace_s: float) -> float:
    """Return how much of the model fractions of stages cover at a pace: 1 where all of it."""
    starts, ends, classes = (
        np.concatenate(each)
        for each in zip(*(
            (fits, fits + length, np.full(len(fits), number))
            for number, own in enumerate(loads) for length, load in enumerate(own, 1)
            for fits in [np.flatnonzero(load <= pace_s * (1 + 1e-12))]
        ), strict=True)
    )  # fmt: skip
    places, ones = np.arange(len(starts)), np.ones(len(starts))
    # what ends at a boundary inside the model goes on there
    flow = sparse.coo_matrix(
        (np.concatenate([ones, -ones]), (np.concatenate([starts, ends]), np.concatenate([places, places]))),
        shape=(problem.num_units + 1, len(starts)),
    ).tocsr()[1:-1]
    begins = (starts == 0).astype(float)
    used = sparse.coo_matrix((ones, (classes, places)), shape=(len(groups), len(starts)))
    done = linprog(
        -begins, A_ub=sparse.vstack([used, sparse.csr_matrix(begins)]), b_ub=[*map(len, groups), 1.0], A_eq=flow,
        b_eq=np.zeros(problem.num_units - 1), bounds=(0, None), method="highs-ipm",
    )  # fmt: skip
    if done.status:
        raise SystemExit(f"the program was not solved: {done.message}")
    return float(-done.fun)


if __name__ == "__main__":
    main()
