"""A short run of benchmarks/fuzz: whatever a reader is given, it refuses in one line or does as it is told."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from benchmarks.fuzz.batch import run_batch
from benchmarks.fuzz.mutate import mutate_document
from benchmarks.fuzz.targets import Target, targets, tell_operators
from penstock.errors import PlanError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are watched through /proc")


def test_generated_cases_hold(tmp_path: Path) -> None:
    """In a process of its own: children of this one would inherit the locks of torch's threads, and not the threads."""
    file = tmp_path / "fuzz.json"
    options = ["--json", str(file), "--cases", "600", "--seed", "1"]
    command = [sys.executable, "-m", "benchmarks.fuzz", *options]
    subprocess.run(command, check=True, cwd=Path(__file__).parent.parent, capture_output=True, timeout=200)
    result = json.loads(file.read_text())
    assert result["failures"] == []
    assert result["summary"]["crashes"] == result["summary"]["files_outside"] == 0
    assert all(row["accepted"] < row["cases"] for row in result["rows"])


def test_a_case_is_the_same_again() -> None:
    first, second = (targets()["plan"].make(Random("0/plan/7")) for _ in range(2))
    assert first == second
    assert mutate_document(Random(1), {"a": [1, 2]}) == mutate_document(Random(1), {"a": [1, 2]})


def test_every_kind_of_failure_is_seen(tmp_path: Path) -> None:
    """Readers that do what none may do."""

    def crash(_: bytes, __: Path) -> None:
        import ctypes

        ctypes.string_at(0)

    def stray(_: bytes, folder: Path) -> None:
        (folder.parent.parent / "outside").write_text("x")

    def greedy(_: bytes, __: Path) -> None:
        bytearray(2**32)

    def lines(_: bytes, __: Path) -> None:
        raise ValueError("no error of ours")

    def good(_: bytes, __: Path) -> None:
        raise PlanError("refused")

    def operator(data: bytes, folder: Path) -> None:
        for tell in tell_operators:
            tell(True)
        crash(data, folder)

    readers = {"good": good, "operator": operator, "crash": crash, "stray": stray, "greedy": greedy, "lines": lines}
    made = {name: Target(1.0, lambda _: b"", read) for name, read in readers.items()}
    folder = tmp_path / "inside" / "batch"
    folder.parent.mkdir()
    rows = run_batch([(name, 0) for name in readers], made, 0, folder)
    failures = {row["target"]: row["failure"].partition(":")[0] for row in rows if "failure" in row}
    assert failures == {
        "crash": "ended with SIGSEGV", "stray": "reached outside", "greedy": "MemoryError", "lines": "ValueError",
    }  # fmt: skip
    assert {row["target"]: row["operators"] for row in rows if "operators" in row} == {"operator": "ended with SIGSEGV"}
