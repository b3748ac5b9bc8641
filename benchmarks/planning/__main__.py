"""Plans against brute force and against the bound, and the time they take: `python -m benchmarks.planning --json FILE`.

Needs no devices and no torch. Rows measured in the lab are added by `cases.py` where it has any.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.planning.cases import lab_rows
from benchmarks.planning.fits import NAME as FITS
from benchmarks.planning.fits import fits_rows
from benchmarks.planning.instances import best_by_force, small, transformer, unequal_devices
from benchmarks.planning.memory import NAME as MEMORY
from benchmarks.planning.memory import errors, memory_rows
from benchmarks.planning.training import training_rows
from penstock.plan.cost.problem import Problem, bottleneck_bound_s, bottleneck_s, fits_all
from penstock.plan.cost.stage_cost import Setting
from penstock.plan.search.exact import best_divisions
from penstock.plan.search.large import good_division

# (units, devices): 12 is where the exact search ends; the last is half a device per unit
SIZES = ((100, 4), (100, 8), (100, 12), (2000, 16), (2000, 64), (2000, 256), (2000, 1000))
QUICK_SIZES = ((100, 4), (100, 8), (2000, 64), (2000, 256))
_EQUAL = 1 + 1e-9


def main() -> None:
    """Plan the instances and write table and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--quick", action="store_true", help="a shorter run of the same shape")
    parser.add_argument("--only", help="only the cases in the lab with these names, separated by commas")
    given = parser.parse_args()
    rows = [against_force(100 if given.quick or given.only else 500)]
    for num_units, num_devices in () if given.only else QUICK_SIZES if given.quick else SIZES:
        rows.append(growth(num_units, num_devices))
        print(f"{num_units} units on {num_devices} devices: {rows[-1]['seconds']:.2f} s", file=sys.stderr)
    rows += lab_rows(quick=given.quick, only=given.only)
    if os.geteuid() == 0 and not given.quick:
        rows += training_rows(given.only)
    if not given.quick:
        rows += memory_rows(given.only)
    if not given.quick or given.only:
        rows += fits_rows(given.only, quick=given.quick)
    result = {"summary": summarize(rows), "environment": environment(), "rows": rows}
    given.json.write_text(json.dumps(result, indent=2) + "\n")
    print_table(rows)
    print(json.dumps(result["summary"]))


def against_force(num_instances: int) -> dict[str, Any]:
    """Compare the exact search, and the search for many devices, with brute force on small instances."""
    optimal = agreed = near = feasible = bounds_held = 0
    ratios: list[float] = []
    for seed in range(num_instances):
        problem = small(seed)
        best = best_by_force(problem)
        found = best_divisions(problem)
        reached = min((value for value, _ in found.values()), default=math.inf) if found is not None else math.nan
        agreed += (best == math.inf) == (reached == math.inf)
        optimal += reached == best or best / _EQUAL <= reached <= best * _EQUAL
        if best == math.inf:
            bounds_held += 1
            continue
        feasible += 1
        bounds_held += bottleneck_bound_s(problem) <= best * _EQUAL
        division = good_division(problem)
        if division is not None:
            ratios.append(bottleneck_s(problem, division) / best)
            near += 1
    return {
        "case": "brute force", "num_instances": num_instances, "num_feasible": feasible,
        "optimal_fraction": optimal / num_instances,
        "feasibility_agrees": agreed / num_instances, "bound_holds": bounds_held / num_instances,
        "heuristic_found": near, "heuristic_median_over_optimum": statistics.median(ratios),
        "heuristic_worst_over_optimum": max(ratios),
    }  # fmt: skip


def growth(num_units: int, num_devices: int) -> dict[str, Any]:
    """Plan a transformer on unequal devices: seconds, and how far from the bound."""
    profile, cluster = transformer(num_units, seed=num_units), unequal_devices(num_devices, seed=num_devices)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    problem = Problem(profile, cluster, Setting())
    division = good_division(problem)
    exact = None
    if division is not None:
        exact = best_divisions(problem, at_most_s=bottleneck_s(problem, division) * _EQUAL)
    if exact:
        division = min(exact.values(), key=lambda item: item[0])[1]
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    if division is None or not fits_all(problem, division):
        sys.exit(f"{num_units} units on {num_devices} devices: no plan that fits")
    pace, bound = bottleneck_s(problem, division), bottleneck_bound_s(problem)
    return {
        "case": "growth", "num_units": num_units, "num_devices": num_devices, "exact": bool(exact),
        "seconds": seconds, "cpu_s": cpu_s, "stages": len(division), "pace_s": pace, "bound_s": bound,
        "gap": pace / bound - 1,
    }  # fmt: skip


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the project watches; null for what was not measured."""
    seconds = {row["num_devices"]: row["seconds"] for row in rows if row["case"] == "growth"}
    off = [abs(row["off"]) for row in rows if row["case"] == "prediction"]
    memory = [abs(part) for row in rows if row["case"] == MEMORY for part in errors(row).values()]
    counted = [abs(part) for row in rows if row["case"] == FITS for part in errors(row).values()]
    trained = [abs(row["predicted"] / row["measured"] - 1) for row in rows if row["case"] == "training prediction"]
    figures = {name: value for row in rows for name, value in row.get("summary", {}).items()}
    return {
        "optimal_fraction": next(row["optimal_fraction"] for row in rows if row["case"] == "brute force"),
        "prediction_error_median": statistics.median(off) if off else None,
        "prediction_error_worst": max(off) if off else None,
        "training_error_median": statistics.median(trained) if trained else None,
        "training_error_worst": max(trained) if trained else None,
        "fits_error_median": statistics.median(counted) if counted else None,
        "fits_error_worst": max(counted) if counted else None,
        "uneven_efficiency": figures.get("uneven_efficiency"),
        "alternating_efficiency": figures.get("alternating_efficiency"),
        "alternating_vs_torch_4": figures.get("alternating_vs_torch_4"),
        "training_memory_error_worst": max(memory, default=None),
        "seconds_256_devices": seconds.get(256),
        "seconds_1000_devices": seconds.get(1000),
    }


def environment() -> dict[str, Any]:
    """Describe what this ran on."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.release(),
        "python": platform.python_version(),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print how time and gap grow, as Markdown."""
    print("| units | devices | stages used | exact | seconds | above the bound |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if row["case"] == "growth":
            exact = "yes" if row["exact"] else "no"
            cells = [row["num_units"], row["num_devices"], row["stages"], exact]
            print("| " + " | ".join(map(str, [*cells, f"{row['seconds']:.2f}", f"{row['gap']:.1%}"])) + " |")
    print("\n| case | predicted beforehand | at the speeds around the run | measured | off | efficiency |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if row["case"] == "prediction":
            rates = [f"{row[name]:.2f}" for name in ("predicted_beforehand", "predicted", "measured")]
            error = f" ± {row['standard_error']:.3f}" if row["standard_error"] is not None else ""
            cells = [row["name"], *rates, f"{row['off']:+.1%}", f"{row['efficiency']:.3f}{error}"]
            print("| " + " | ".join(cells) + " |")
    print("\n| hosts | shape, microbatches | beforehand | at the speeds around the run | measured, rows/s | off |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if row["case"] == "training prediction":
            shape = f"{' + '.join(map(str, row['shape']))} stages, {' + '.join(map(str, row['microbatches']))}"
            rates = [f"{row[name]:.3f}" for name in ("predicted_beforehand", "predicted", "measured")]
            off = f"{row['predicted'] / row['measured'] - 1:+.1%}"
            print("| " + " | ".join([row["name"], shape, *rates, off]) + " |")
    print("\n| memory in training | stages of each pipeline, schedule | predicted, MB | measured, MB | off |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        if row["case"] == MEMORY:
            cells = [row["name"], f"{' + '.join(map(str, row['shape']))}, {row['schedule']}"]
            sizes = [
                ", ".join(f"{row[key][name] / 1e6:.0f}" for name in row["measured"])
                for key in ("predicted", "measured")
            ]
            print("| " + " | ".join([*cells, *sizes, ", ".join(f"{off:+.1%}" for off in errors(row).values())]) + " |")


if __name__ == "__main__":
    main()
