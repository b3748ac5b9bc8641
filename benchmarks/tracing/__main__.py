"""The account of runs that were slowed on purpose, and what tracing costs: `python -m benchmarks.tracing --json FILE`.

Needs root and two free cores; see the README beside this file.
"""

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.labs import lab_text, run_session
from benchmarks.pipeline.__main__ import environment
from benchmarks.tracing.cases import CASES, HOSTS, SHARE, TOGGLED, Case, Toggled, expected, within
from benchmarks.tracing.toggling import is_on, live
from penstock.cluster.lab import take_down
from penstock.units import parse_rate

LAB = "tracing"
_LIVE = "live view"


def main() -> None:
    """Run the cases and write table and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--quick", action="store_true", help="fewer blocks of tracing on and off")
    parser.add_argument("--only", help="only the cases with these names, separated by commas, and the first one")
    parser.add_argument("--traces", type=Path, help="keep each account's run here, for `penstock report DIR/NAME`")
    given = parser.parse_args()
    take_down(LAB)  # what an earlier run that was killed may have left
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    wanted = given.only.split(",") if given.only else None
    rows: list[dict[str, Any]] = []
    toggled = [case for case in TOGGLED if wanted is None or case.name in wanted]
    chosen = [case for case in CASES if wanted is None or case.name in wanted]
    if chosen and CASES[0] not in chosen:
        chosen.insert(0, CASES[0])  # what the others are held against
    for case in chosen:
        rows.append(account_row(case, rows[0] if rows else None, given.traces))
        save(given.json, rows)
    for each in toggled:
        rows.append(toggled_row(each, 12 if given.quick else each.num_blocks))
        save(given.json, rows)
    if wanted is None or _LIVE in wanted:
        rows.append({"case": _LIVE, "picture_cpu_s": statistics.median(live())})
    save(given.json, rows)
    print_table(rows)
    print(json.dumps(summarize(rows)))


def account_row(case: Case, base: dict[str, Any] | None, traces: Path | None) -> dict[str, Any]:
    """Run a case and hold its account against what was known before."""
    result = run(case, traces)
    known = result["known"] | {"bandwidth": parse_rate(case.bandwidth)}
    if "overhead_cpu_s" in known:
        known["overhead_s"] = known["overhead_cpu_s"] / SHARE
    before = {} if base is None else {**base["lines"], "speedup": base["speedup"], "alone_s": base["alone_s"]}
    size = expected(case, before, known) if case.cause else None
    row = {"case": case.name, "cause": case.cause, "expected": size, **result}
    if case.cause is not None and size is not None:
        found = result["lines"][case.cause]
        row |= {"found": found, "named_first": result["first"] == case.cause, "within": within(found, size)}
    return row


def toggled_row(case: Toggled, num_blocks: int) -> dict[str, Any]:
    """Run with recording going on and off, and compare each block with its neighbour."""
    given = asdict(case) | {"num_blocks": num_blocks}
    taken = [result for _, result in sorted(start("toggling", given, (SHARE,) * HOSTS).items())]
    row: dict[str, Any] = {"case": case.name, "num_blocks": num_blocks, "blocks": taken}
    # hosts go through a block nearly together: the mean of their seconds, the sum of their CPU seconds
    for key, place in (("seconds", 0), ("cpu", 1)):
        row[key] = compare_pairs(np.array(taken)[:, :, place].sum(axis=0))
    return row


def compare_pairs(blocks: NDArray[np.float64]) -> dict[str, float]:
    """Return what on adds to off: the median over pairs of blocks, and its interval by the bootstrap (Efron 1979).

    >>> compare_pairs(np.array([1.01, 1.0, 1.0, 1.01]))["median"]
    0.01
    """
    pairs = blocks[: len(blocks) // 2 * 2].reshape(-1, 2)
    more = np.array([on / off if is_on(2 * n) else off / on for n, (on, off) in enumerate(pairs)]) - 1
    drawn = np.random.default_rng(0).choice(more, (10_000, len(more)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {key: round(float(x), 6) for key, x in (("median", np.median(more)), ("low", low), ("high", high))}


def run(case: Case, traces: Path | None) -> dict[str, Any]:
    """Stream in a case's lab; return what its first host made of it."""
    given = asdict(case) | {"folder": str(traces.resolve() / case.name) if traces else None}
    written = start("session", given, case.shares, case.bandwidth)
    result: dict[str, Any] = written["result"]
    return result


def start(session: str, given: dict[str, Any], shares: Sequence[float], bandwidth: str = "1 Gbit/s") -> dict[str, Any]:
    """Run a session on the hosts of a lab; return what they wrote."""
    lab = lab_text(LAB, shares, bandwidth=bandwidth, memory="2 GiB")
    return run_session(lab, f"benchmarks.tracing.{session}", given, given["name"])


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the project watches; the remainder is in parts of n."""
    accounts = [row for row in rows if "lines" in row]
    provoked = [row for row in accounts if row.get("expected") is not None]
    return {
        "overhead": next((row["seconds"]["median"] for row in rows if row["case"] == TOGGLED[0].name), None),
        "overhead_training": next((row["seconds"]["median"] for row in rows if row["case"] == TOGGLED[1].name), None),
        "account_remainder_worst": max((abs(r["lines"]["remainder"]) / r["num_times"] for r in accounts), default=None),
        "causes_named_first": sum(row["named_first"] for row in provoked),
        "causes_within_a_fifth": sum(row["within"] for row in provoked),
        "causes": len(provoked),
    }


def save(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write what there is so far."""
    file.write_text(
        json.dumps({"summary": summarize(rows), "environment": environment(), "rows": rows}, indent=2) + "\n"
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows as Markdown."""
    print("| case | speed-up | cause | expected | found | named first | not explained |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if "lines" in row:
            cells = [row["case"], f"{row['speedup']:.2f}", row["cause"] or ""]
            cells += [f"{row[key]:.2f}" if row.get(key) is not None else "" for key in ("expected", "found")]
            cells.append({True: "yes", False: f"no: {row['first']}", None: ""}[row.get("named_first")])
            print("| " + " | ".join([*cells, f"{row['lines']['remainder']:+.3f}"]) + " |")
    for row in rows:
        for key in ("seconds", "cpu"):
            if key in row:
                more = row[key]
                print(f"{row['case']}, {key}: {more['median']:+.2%} (95%: {more['low']:+.2%} to {more['high']:+.2%})")
        if "picture_cpu_s" in row:
            print(f"{row['case']}: {1e3 * row['picture_cpu_s']:.1f} ms of CPU for a picture")


if __name__ == "__main__":
    main()
