"""The account of runs that were slowed on purpose, and what tracing costs: `python -m benchmarks.tracing --json FILE`.

Needs root and two free cores; see the README beside this file.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pipeline.__main__ import environment, show
from benchmarks.tracing.cases import CASES, SHARE, Case, expected, within
from penstock.cluster.lab import lab_session, parse_lab, take_down
from penstock.units import parse_rate

ROOT = Path(__file__).parents[2]
LAB = "tracing"
_OVERHEAD = Case(name="tracing on and off", num_images=200)


def main() -> None:
    """Run the cases and write table and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing")
    parser.add_argument("--json", type=Path, required=True, help="every row and the summary")
    parser.add_argument("--quick", action="store_true", help="one round of tracing on and off, with 60 images")
    parser.add_argument("--only", help="only the cases with these names, separated by commas, and the first one")
    parser.add_argument("--rounds", type=int, default=3, help="of tracing on and off")
    given = parser.parse_args()
    take_down(LAB)  # what an earlier run that was killed may have left
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    wanted = given.only.split(",") if given.only else None
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if wanted is None or case.name in wanted or not rows:
            rows.append(account_row(case, rows[0] if rows else None))
            save(given.json, rows)
    if wanted is None or _OVERHEAD.name in wanted:
        num, rounds = (60, 1) if given.quick else (_OVERHEAD.num_images, given.rounds)
        result = run(_OVERHEAD, kind="overhead", rounds=rounds, num_images=num)
        on, off = (statistics.median(result["seconds"][way]) for way in ("on", "off"))
        rows.append({"case": _OVERHEAD.name, **result, "overhead": on / off - 1})
    save(given.json, rows)
    print_table(rows)
    print(json.dumps(summarize(rows)))


def account_row(case: Case, base: dict[str, Any] | None) -> dict[str, Any]:
    """Run a case and hold its account against what was known before."""
    result = run(case, kind="account")
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


def run(case: Case, **more: Any) -> dict[str, Any]:
    """Put the case's lab up, stream on it, and take it down."""
    hosts = "".join(
        f'[[hosts]]\nname = "host{index}"\ncpu = {cpu}\nmemory = "2 GiB"\n' for index, cpu in enumerate(case.shares)
    )
    spec = parse_lab(f'name = "{LAB}"\nbandwidth = "{case.bandwidth}"\n{hosts}')
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        file = Path(folder) / "session.json"
        file.write_text(json.dumps(asdict(case) | more))
        command = [sys.executable, "-m", "benchmarks.tracing.session", str(file)]
        env = {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        with lab_session(spec) as lab, lab.start(command, output=show, env=env) as started:
            started.wait()
        if started.first_failure:
            sys.exit(f"{case.name}: {started.first_failure}")
        result: dict[str, Any] = json.loads(file.with_suffix(".result.json").read_text())
    return result


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the figures that the project watches; the remainder is in parts of n."""
    accounts = [row for row in rows if "lines" in row]
    provoked = [row for row in accounts if row.get("expected") is not None]
    return {
        "overhead": next((row["overhead"] for row in rows if "overhead" in row), None),
        "account_remainder_worst": max(abs(row["lines"]["remainder"]) / row["num_times"] for row in accounts),
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


if __name__ == "__main__":
    main()
