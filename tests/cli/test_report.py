"""`penstock infer --trace` and `penstock report`: from a run to its page."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL

Run = Callable[..., tuple[int, str, str]]


def test_from_a_run_to_its_page(penstock: Run, photos: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "report.json"
    arguments = ["--images", photos, "-o", tmp_path / "p.csv", "--stages", 2, "--threads", 1, "--trace", run]
    assert penstock("infer", SMALL, *arguments)[0] == 0
    status, out, _ = penstock("report", run, "--no-pictures", "--json", file)
    assert status == 0
    assert "of 2.00." in out.splitlines()[0]
    result = json.loads(file.read_text())
    assert result["num_times"] - sum(line["times"] for line in result["lines"]) == pytest.approx(result["speedup"])
    assert result["advice"][1].startswith("Planned for what was measured")
    assert (run / "trace-2.json").exists()


def test_what_is_no_run(penstock: Run, tmp_path: Path) -> None:
    status, _, errors = penstock("report", tmp_path)
    assert status == 2
    assert "has no run.json" in errors
