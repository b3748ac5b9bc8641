"""Training on emulated hosts beside torch's own means: `python -m benchmarks.training --json FILE`.

Needs root and two free cores; see the README beside this file.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.labs import lab_text, run_session
from benchmarks.training.gradients import gradient_rows
from penstock.cluster.lab import take_down
from penstock.plan.schedule.custom import bubble_formula
from penstock.plan.schedule.schedules import Action, make_schedule
from penstock.plan.schedule.simulate import simulate

LAB = "bench"
LENGTH = 128
CPU = 0.35


def way(name: str, **settings: Any) -> dict[str, Any]:
    """One row: a way to train, on how many hosts, with how many sequences and microbatches."""
    given = {"way": "penstock", "stages": 1, "replicas": 1, "schedule": "1f1b", "microbatches": 1}
    return given | settings | {"name": name}


BUBBLES = "bubble", "bubble_without_messages", "bubble_by_formula"
SHARED = "two hosts, data parallel, 8 sequences each"
LARGE = "two hosts, data parallel, 32 sequences each"
DDP_2 = "two hosts, torch's DDP, 8 sequences each"
ALONE = "one of the two hosts, {} sequences, the other waits"
SIDE = "two hosts side by side, {} sequences each, nothing shared"
MODEL_2 = "two stages, one microbatch (model parallel)"
PIPELINE_2 = "two stages, 1f1b, 16 microbatches"
PIPELINE_4 = "four stages, 1f1b, 16 microbatches"
TORCH_4 = "four stages, torch's 1F1B, 16 microbatches"
INTERLEAVED_4 = "four hosts, interleaved, eight stages, 16 microbatches"


def all_groups() -> list[list[dict[str, Any]]]:
    """Give the rows of the full benchmark; those of a group take their steps in turns on the same hosts.

    `rows` are the sequences of each process's own step.
    """
    four = {"hosts": 4, "stages": 4, "rows": 16, "microbatches": 16, "steps": 7}
    two = {"hosts": 2, "stages": 2, "rows": 16, "steps": 7}
    each_8 = {"hosts": 2, "replicas": 2, "rows": 8, "steps": 9}
    each_32 = {"hosts": 2, "replicas": 2, "rows": 32, "steps": 3}
    return [
        [
            way(SHARED, **each_8),
            way(DDP_2, **each_8, way="ddp"),
            way(ALONE.format(8), **each_8, way="alone"),
            way(SIDE.format(8), **each_8, way="side by side"),
        ],
        *(
            [
                way(LARGE + note, **each_32, microbatches=count),
                way(ALONE.format(32) + note, **each_32, microbatches=count, way="alone"),
                way(SIDE.format(32) + note, **each_32, microbatches=count, way="side by side"),
            ]
            for count, note in ((1, ""), (4, ", in 4 microbatches"))
        ),
        [way(PIPELINE_2, **two, microbatches=16), way(MODEL_2, **two)],
        [way(PIPELINE_4, **four), way(TORCH_4, **four, way="torch 1f1b")],
        [
            *(
                way(f"four stages, {name}, in turns", **four, schedule=name)
                for name in ("gpipe", "1f1b", "zero-bubble")
            ),
            way(INTERLEAVED_4, **four | {"stages": 8}, schedule="interleaved"),
        ],
    ]


def main() -> None:
    """Run the rows and write table and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--quick", action="store_true", help="two steps for each row")
    parser.add_argument("--only", action="append", help="only rows whose name has this in it; may be repeated")
    given = parser.parse_args()
    take_down(LAB)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    wanted = given.only or [""]
    gradients = gradient_rows() if any(only in "gradients" for only in wanted) else []
    rows: list[dict[str, Any]] = []
    _write(given.json, rows, gradients)
    for group in all_groups():
        if any(only in row["name"] for row in group for only in wanted):
            for found in run([row | {"steps": 2} for row in group] if given.quick else group):
                rows.append(found)
                print(f"{found['name']}: {found['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
            _write(given.json, rows, gradients)
    _print(rows, gradients)


def _write(path: Path, rows: list[dict[str, Any]], gradients: list[dict[str, Any]]) -> None:
    result = {"summary": summarize(rows, gradients), "environment": environment(), "rows": [*gradients, *rows]}
    path.write_text(json.dumps(result, indent=2) + "\n")


def _print(rows: list[dict[str, Any]], gradients: list[dict[str, Any]]) -> None:
    for row in gradients:
        print(f"{row['name']}: {', '.join(f'{way} {error:.1e}' for way, error in row['errors'].items())}")
    print("| what | hosts | tokens/s | first loss | bubble | without messages | by the formula |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        bubbles = " | ".join("" if row[key] is None else f"{row[key]:.1%}" for key in BUBBLES)
        loss = row["losses"][0]
        first = "" if loss is None else f"{loss:.5f}"
        print(f"| {row['name']} | {row['hosts']} | {row['tokens_per_s']:.0f} | {first} | {bubbles} |")
    print(json.dumps(summarize(rows, gradients)))


def run(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put up as many hosts as a group of rows needs, train in turns, and take them down."""
    count = group[0]["hosts"]
    lab = lab_text(LAB, [CPU] * count)
    written = run_session(lab, "benchmarks.training.session", {"ways": group}, group[0]["name"])
    results = [written[str(rank)] for rank in range(count)]
    return [_found(row, list(own)) for row, own in zip(group, zip(*results, strict=True), strict=True)]


def _found(row: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Give a row with what its hosts measured."""
    sequences = row["rows"] * (1 if row["way"] == "alone" else row["replicas"])
    seconds = statistics.median(results[0]["seconds"])
    first = {key: results[0][key] for key in ("seconds", "cpu_seconds", "losses")}
    per_host = [result["per_step"] for result in results]
    found = row | first | {"per_host": per_host, "tokens_per_s": sequences * LENGTH / seconds}
    return found | dict(zip(BUBBLES, bubbles(row, per_host), strict=True))


def bubbles(row: dict[str, Any], per_host: list[dict[str, float] | None]) -> tuple[float | None, ...]:
    """Give the part of all hosts' time in a step in which they wait: measured, with no messages, by the formula.

    A step lasts from the first forward until all know the loss; the optimizer's own step is not in it. Waiting is
    for neighbours, for messages to leave, and at the end for the others. The second one is the schedule played with
    each host's measured seconds and messages that take no time; the formula has equal stages too.
    """
    reports = [report for report in per_host if report is not None]
    if row["stages"] == 1 or not reports:
        return None, None, None
    busy = sum(report["forward_s"] + report["backward_s"] for report in reports)
    idle = sum(report["wait_s"] + report["synchronize_s"] for report in reports)
    counts = row["stages"], row["microbatches"], row["hosts"]
    parts = {"F": ("forward_s", 1.0), "B": ("backward_s", 1.0), "I": ("backward_s", 0.5), "W": ("backward_s", 0.5)}

    def seconds(action: Action, device: int) -> float:
        key, part = parts[action.kind]
        return part * reports[device][key]  # of all microbatches: shares are what counts

    played = simulate(make_schedule(row["schedule"], *counts), seconds)
    return idle / (busy + idle), played.bubble_fraction, bubble_formula(row["schedule"], *counts)[1]


def summarize(rows: list[dict[str, Any]], gradients: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the figures that the project watches; null where a row was not run."""
    rate = {row["name"]: row["tokens_per_s"] for row in rows}

    def ratio(one: str, other: str) -> float | None:
        return rate[one] / rate[other] if one in rate and other in rate else None

    large = [name for name in rate if name.startswith(LARGE)]
    return {
        "max_gradient_error": max((error for row in gradients for error in row["errors"].values()), default=None),
        "bubbles": {row["name"]: [row[key] for key in BUBBLES] for row in rows if row["bubble"]},
        "data_parallel_speedup_2": ratio(SHARED, ALONE.format(8)),
        "data_parallel_over_ddp_2": ratio(SHARED, DDP_2),
        "data_parallel_speedup_2_of_32": {name: ratio(name, ALONE.format(32) + name[len(LARGE) :]) for name in large},
        "data_parallel_over_side_by_side_2": ratio(LARGE, SIDE.format(32)),
        "pipeline_over_model_parallel_2": ratio(PIPELINE_2, MODEL_2),
        "vs_torch_4": ratio(PIPELINE_4, TORCH_4),
    }


def environment() -> dict[str, Any]:
    """Say what this ran on."""
    return {
        "cores": os.cpu_count(), "cpu_share_of_each_host": CPU, "machine": platform.machine(),
        "system": platform.release(), "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
