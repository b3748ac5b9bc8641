"""Forge what comes from outside and see it refused: `python -m benchmarks.fuzz --json FILE [--quick]`."""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.batch import BOUND_BYTES, Case, run_batch
from benchmarks.fuzz.targets import Target, targets

NUM_CASES, QUICK_CASES = 100_000, 2_000
_BATCH = 1000


def main() -> None:
    """Run every case and write the failures, the counts and the summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="rows and the summary")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CASES} cases")
    parser.add_argument("--cases", type=int, help="another number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only these targets, separated by commas, such as program,plan")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    num_cases = given.cases or (QUICK_CASES if given.quick else NUM_CASES)
    result = fuzz(num_cases, given.seed, given.only.split(",") if given.only else ())
    result["summary"]["seconds"] = round(time.perf_counter() - begin, 1)
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"]))


def fuzz(num_cases: int, seed: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Run so many cases, shared out over the targets; gives rows, failures and the summary."""
    known = {name: target for name, target in targets().items() if not only or name in only}
    torch.ones(2, device="meta") + 1  # what torch loads for this is loaded once, before children are made
    cases = _share(num_cases, known)
    failures: list[dict[str, Any]] = []
    operators: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(os.path.realpath(parent)) / "inside" / "batch"
        folder.parent.mkdir()
        for name, own in cases.items():
            found: list[dict[str, Any]] = []
            for start in range(0, len(own), _BATCH):
                found += run_batch(own[start : start + _BATCH], known, seed, folder)
            wrong = [row for row in found if "failure" in row]
            accepted = sum(row.get("accepted", 0) for row in found)
            failures += wrong
            operators += [row for row in found if "operators" in row]
            rows.append({"target": name, "cases": len(own), "accepted": accepted, "failures": len(wrong)})
            print(json.dumps(rows[-1]), file=sys.stderr)
        strayed = sorted(str(path) for path in Path(parent).rglob("*") if folder not in (path, *path.parents))
    kinds = Counter(row["failure"].partition(":")[0] for row in failures)
    summary = {
        "cases": sum(row["cases"] for row in rows),
        "failures": len(failures),
        "kinds": dict(kinds),
        "crashes": sum(row["failure"].startswith(("ended with", "did not end")) for row in failures),
        "files_outside": len(strayed) - 1 + sum("reached outside" in row["failure"] for row in failures),
        "operators": dict(Counter(row["operators"].partition(":")[0] for row in operators)),
        "bound_bytes": BOUND_BYTES,
    }
    environment = _environment(seed)
    return {"summary": summary, "environment": environment, "rows": rows, "failures": failures, "operators": operators}


def _share(num_cases: int, known: dict[str, Target]) -> dict[str, list[Case]]:
    whole = sum(target.share for target in known.values())
    return {name: [(name, n) for n in range(round(num_cases * t.share / whole))] for name, t in known.items()}


def _environment(seed: int) -> dict[str, Any]:
    return {"seed": seed, "torch": torch.__version__, "python": platform.python_version(),
            "platform": platform.platform()}  # fmt: skip


if __name__ == "__main__":
    main()
