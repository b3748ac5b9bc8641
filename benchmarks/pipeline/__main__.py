"""Pipelines on emulated hosts against the ceiling and against torch: `python -m benchmarks.pipeline --json FILE`.

Needs root and two free cores; see the README beside this file.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.labs import lab_text, run_session
from benchmarks.pipeline.cases import BASE, Case, all_cases, quick_cases
from benchmarks.pipeline.figure import draw
from penstock.cluster.lab import take_down

LAB = "bench"


def main() -> None:
    """Run the cases and write table, JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--png", type=Path, help="the figure; beside the JSON file where not given")
    parser.add_argument("--quick", action="store_true", help="a shorter run of the same shape")
    parser.add_argument("--only", help="only the cases with this name, separated by commas")
    parser.add_argument("--depth", type=int, default=2, help="microbatches that may wait at a cut")
    given = parser.parse_args()
    cases = quick_cases() if given.quick else all_cases()
    if given.only:
        cases = [case for case in cases if case.name in given.only.split(",")]
    take_down(LAB)  # what an earlier run that was killed may have left
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows += run(case, given.depth)
        result = {"summary": summarize(rows), "environment": environment(), "rows": rows}
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    print_table(rows)
    print(json.dumps(summarize(rows)))
    draw(rows, given.png or given.json.with_suffix(".png"))


def lab_of(case: Case) -> str:
    """Write the case's lab file."""
    return lab_text(LAB, case.shares, bandwidth=case.bandwidth)


def run(case: Case, depth: int) -> list[dict[str, Any]]:
    """Put the case's lab up, measure on it, and take it down."""
    session = {
        name: getattr(case, name)
        for name in (
            "name", "model", "num_images", "passes", "serial_images", "microbatch_size", "rounds", "tasks", "bandwidth",
        )
    }  # fmt: skip
    lab = lab_of(case)
    rows = run_session(lab, "benchmarks.pipeline.session", session | {"depth": depth, "lab": lab}, case.name)["rows"]
    facts = {"hosts": case.hosts, "cpu": case.cpu, "bandwidth": case.bandwidth, "model": case.model}
    return [{"case": case.name, **facts, "microbatch_size": case.microbatch_size, **row} for row in rows]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the figures that the project watches; medians over the rounds."""

    def median(case: str, label: str, field: str) -> float | None:
        values = [row[field] for row in rows if row["case"] == case and row.get("label") == label]
        return statistics.median(values) if values else None

    ours = median("base", BASE, "images_per_second")
    theirs = median("base", "4 stages, torch.distributed.pipelining", "images_per_second")
    return {
        "efficiency_2": median("two hosts", "2 stages, balanced", "efficiency"),
        "efficiency_4": median("base", BASE, "efficiency"),
        "efficiency_6_on_4": median("stages on four hosts", "6 stages, balanced", "efficiency"),
        "efficiency_6": median("six hosts of 0.22", "6 stages, balanced", "efficiency"),
        "speedup_4": median("base", BASE, "speedup"),
        "vs_torch_4": ours / theirs if ours and theirs else None,
        "bit_equal": all(row["bit_equal"] for row in rows if row["bit_equal"] is not None),
    }


def standard_error(values: Sequence[float]) -> float | None:
    """Give the standard error of the mean; None for one value alone."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def environment() -> dict[str, Any]:
    """Say what this ran on."""
    import platform

    import torch

    return {
        "cores": os.cpu_count(), "machine": platform.machine(), "system": platform.release(),
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip


def seconds_of(row: dict[str, Any]) -> str:
    """Write the seconds of a row's stages: computing, waiting, sending."""
    return "  ".join(f"{s['compute_s']:.1f}/{s['wait_s']:.1f}/{s['send_s']:.1f}" for s in row["per_stage"])


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows as Markdown, medians over rounds with the smallest and the largest."""
    print("| case | what | images/s | speed-up | efficiency | of torch's | bit-equal | compute / wait / send, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case, label in dict.fromkeys((row["case"], row.get("label", "serial")) for row in rows):
        group = [row for row in rows if (row["case"], row.get("label", "serial")) == (case, label)]
        rates = [row["images_per_second"] for row in group]
        spread = f" ({min(rates):.2f} to {max(rates):.2f})" if len(rates) > 1 else ""
        known = [row["efficiency"] for row in group if row["efficiency"]]
        passes = [each for row in group for each in row.get("pass_efficiencies", ())]
        error = standard_error(passes)
        between = f" ± {error:.3f} ({min(passes):.3f} to {max(passes):.3f})" if error is not None else ""
        against = [row["images_per_second"] / p for row in group if (p := row.get("peer_images_per_second"))]
        cells = [case, label, f"{statistics.median(rates):.2f}{spread}"]
        cells.append(f"{statistics.median(row['speedup'] for row in group):.2f}")
        cells.append(f"{statistics.median(known):.3f}{between}" if known else "")
        cells.append(f"{statistics.median(against):.2f}" if against else "")
        cells.append({True: "yes", False: "no", None: ""}[group[-1]["bit_equal"]])
        print("| " + " | ".join([*cells, seconds_of(group[-1])]) + " |")


if __name__ == "__main__":
    main()
