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
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipeline.__main__ import show
from penstock.cluster.lab import lab_session, parse_lab, take_down

ROOT = Path(__file__).parents[2]
LAB = "bench"
LENGTH = 128
CPU = 0.35


def way(name: str, **settings: Any) -> dict[str, Any]:
    """One row: a way to train, on how many hosts, with how many sequences and microbatches."""
    given: dict[str, Any] = {
        "stages": 1,
        "replicas": 1,
        "schedule": "1f1b",
        "microbatches": 1,
        "steps": 4,
        "rows_differ": False,
    }
    row = given | {"way": "penstock"} | settings | {"name": name}
    return row | {"rows_differ": row["replicas"] > 1 or row["way"] == "ddp"}


TORCH_4 = "four stages, torch's 1F1B, 16 microbatches"


def all_rows() -> list[dict[str, Any]]:
    """Give the rows of the full benchmark; `rows` are the sequences of each process's own step."""
    pipelines = [
        way(f"four stages, {schedule}, 16 microbatches", hosts=4, stages=4, rows=16, microbatches=16, schedule=schedule)
        for schedule in ("gpipe", "1f1b", "zero-bubble")
    ]
    return [
        way("one host", hosts=1, rows=8),
        way("two hosts, data parallel, 8 sequences each", hosts=2, replicas=2, rows=8),
        way("two hosts, torch's DDP, 8 sequences each", hosts=2, replicas=2, rows=8, way="ddp"),
        way("two hosts, data parallel, 32 sequences each", hosts=2, replicas=2, rows=32, steps=2),
        way("two stages, one microbatch (model parallel)", hosts=2, stages=2, rows=16),
        way("two stages, 1f1b, 16 microbatches", hosts=2, stages=2, rows=16, microbatches=16),
        *pipelines,
        way(TORCH_4, hosts=4, stages=4, rows=16, microbatches=16, way="torch 1f1b"),
    ]


def main() -> None:
    """Run the rows and write table and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--quick", action="store_true", help="two steps for each row")
    parser.add_argument("--only", help="only the rows whose name has this in it")
    given = parser.parse_args()
    take_down(LAB)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    rows: list[dict[str, Any]] = []
    for row in all_rows():
        if given.only is None or given.only in row["name"]:
            rows.append(run(row | {"steps": 2} if given.quick else row))
            print(f"{row['name']}: {rows[-1]['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
            result = {"summary": summarize(rows), "environment": environment(), "rows": rows}
            given.json.write_text(json.dumps(result, indent=2) + "\n")
    print("| what | hosts | tokens/s | first loss |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row['name']} | {row['hosts']} | {row['tokens_per_s']:.0f} | {_number(row['losses'][0])} |")
    print(json.dumps(summarize(rows)))


def _number(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.5f}"


def run(row: dict[str, Any]) -> dict[str, Any]:
    """Put up as many hosts as the row needs, train, and take them down."""
    hosts = "".join(
        f'[[hosts]]\nname = "host{index}"\ncpu = {CPU}\nmemory = "3 GiB"\n' for index in range(row["hosts"])
    )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        file = Path(folder) / "session.json"
        file.write_text(json.dumps(row))
        command = [sys.executable, "-m", "benchmarks.training.session", str(file)]
        env = {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        spec = parse_lab(f'name = "{LAB}"\nbandwidth = "1 Gbit/s"\n{hosts}')
        with lab_session(spec) as lab, lab.start(command, output=show, env=env) as started:
            started.wait()
        if started.first_failure:
            sys.exit(f"{row['name']}: {started.first_failure}")
        result: dict[str, Any] = json.loads(file.with_suffix(".result.json").read_text())
    sequences = row["rows"] * row["replicas"]
    seconds = statistics.median(result["seconds"])
    return row | result | {"tokens_per_s": sequences * LENGTH / seconds}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the figures that the project watches; null where a row was not run. Gradients are compared in the tests."""
    rate = {row["name"]: row["tokens_per_s"] for row in rows}

    def ratio(one: str, other: str) -> float | None:
        return rate[one] / rate[other] if one in rate and other in rate else None

    own = [name for name in rate if name.startswith("four stages, ") and name != TORCH_4]
    best = max(own, key=rate.__getitem__, default="")
    return {
        "max_gradient_error": None,
        "data_parallel_speedup_2": ratio("two hosts, data parallel, 8 sequences each", "one host"),
        "data_parallel_over_ddp_2": ratio(
            "two hosts, data parallel, 8 sequences each", "two hosts, torch's DDP, 8 sequences each"
        ),
        "pipeline_over_model_parallel_2": ratio(
            "two stages, 1f1b, 16 microbatches", "two stages, one microbatch (model parallel)"
        ),
        "vs_torch_4": ratio("four stages, 1f1b, 16 microbatches", TORCH_4),
        "best_vs_torch_4": ratio(best, TORCH_4),
        "best_4": best or None,
    }


def environment() -> dict[str, Any]:
    """Say what this ran on."""
    return {
        "cores": os.cpu_count(), "cpu_share_of_each_host": CPU, "machine": platform.machine(),
        "system": platform.release(), "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
