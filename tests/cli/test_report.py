"""`penstock infer --trace` and `penstock report`: from a run to its page."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SMALL
from tests.report.written_metrics import epoch, trained, write_metrics

Run = Callable[..., tuple[int, str, str]]


def test_report_verb_writes_the_page(penstock: Run, photos: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "report.json"
    arguments = ["--images", photos, "-o", tmp_path / "p.csv", "--stages", 2, "--threads", 1, "--trace", run]
    assert penstock("infer", SMALL, *arguments)[0] == 0
    status, out, _ = penstock("report", run, "--json", file)
    assert status == 0
    assert "2.00)" in out.splitlines()[0]
    result = json.loads(file.read_text())
    assert result["num_times"] - sum(line["times"] for line in result["lines"]) == pytest.approx(result["speedup"])
    assert "predicted for this run" in result["advice"][1]
    assert (run / "trace-2.json").exists()
    serial, page = tmp_path / "serial", tmp_path / "both.html"
    arguments = ["--images", photos, "-o", tmp_path / "s.csv", "--stages", 1, "--threads", 1, "--trace", serial]
    assert penstock("infer", SMALL, *arguments, "--set", "torch_profiler=true")[0] == 0
    status, out, errors = penstock("report", serial, run, "-o", page, "--json", file)
    assert status == 0, errors
    assert out.splitlines()[1].startswith(f"run: {SMALL} in 2 stages, ")
    result = json.loads(file.read_text())
    differences = {row[0]: row[1:] for row in result["differences"]}
    assert result["runs"] == ["serial", "run"]
    assert differences["number of stages"] == [1, 2]
    assert differences["speed-up, times serial"][0] == "1.00"
    (heads,) = [line for line in out.splitlines() if "quantity" in line]
    assert heads.split()[1:-1:2] == ["quantity", "serial", "run"]
    seconds = {row[0]: row[1:] for row in result["operators"]}
    assert "aten::addmm" in seconds
    assert seconds["aten::addmm"][3:] == [None, None, None]  # the other run was not profiled
    assert seconds["(send a message)"][1::3] == ["1", "2"]
    text = page.read_text(encoding="utf-8")
    assert "serial: Timeline" in text
    assert "run: Timeline" in text
    assert "No operators were recorded of run" in text


def test_folder_without_a_run_is_refused(penstock: Run, tmp_path: Path) -> None:
    status, _, errors = penstock("report", tmp_path)
    assert status == 2
    assert "run.json not found" in errors
    status, _, errors = penstock("report", tmp_path, "-o", tmp_path / "page.html")
    assert (status, errors) == (
        2,
        "error: --output is for several runs; the page of a single run is in the run's folder; leave it out\n",
    )


def test_an_elastic_training_without_a_trace(penstock: Run, tmp_path: Path) -> None:
    folder, file = write_metrics(tmp_path / "vit", trained()), tmp_path / "report.json"
    status, out, _ = penstock("report", folder, "--json", file)
    assert status == 0
    assert out.splitlines()[0].startswith("12 epochs, 120 steps, training loss 1.5 to 1.5, validation loss 1.2, acc")
    assert out.splitlines()[1].startswith("12 epochs, from 4 stages × 1 replica with 0 of 12 layers frozen to 1 stage")
    assert "Elastic training is not traced" in out
    result = json.loads(file.read_text())
    assert [plan["frozen_layers"] for plan in result["plans"]] == [0, 4, 7, 9, 10, 11]
    assert str(folder / "plans.csv") in result["files"]
    assert (folder / "report.html").exists()


def test_training_without_plans_or_trace(penstock: Run, tmp_path: Path) -> None:
    folder = write_metrics(tmp_path / "vit", [*steps(1, 10), epoch(0), *steps(11, 20), epoch(1, accuracy=0.75)])
    status, out, _ = penstock("report", folder)
    assert status == 0
    assert "2 epochs, 20 steps" in out
    assert "accuracy 75.00% (best 75.00%, epoch 1), 40 images/s." in out
    assert not (folder / "plans.csv").exists()
    rows = list(csv.reader((folder / "epochs.csv").read_text().splitlines()))
    assert rows[1:] == [
        ["0", "10", "1.5", "1.2", "0.5", "40 images/s"],
        ["1", "20", "1.5", "1.2", "0.75", "40 images/s"],
    ]


def test_trainings_beside_each_other(penstock: Run, tmp_path: Path) -> None:
    names = ["one", "two"]
    for number, name in enumerate(names):
        folder = write_metrics(tmp_path / name, [*steps(1, 10), epoch(0, accuracy=0.5 + 0.25 * number)])
        (folder / "settings.json").write_text(json.dumps({"lr": 10.0**-number, "seed": 0, "output": name}))
    page, file = tmp_path / "page.html", tmp_path / "beside.json"
    status, out, _ = penstock("report", *(tmp_path / name for name in names), "-o", page, "--json", file)
    assert status == 0
    assert "two: 1 epoch, 10 steps" in out
    result = json.loads(file.read_text())
    assert result["differences"] == [["lr", "1.0", "0.1"]]
    assert [(row[0], row[5]) for row in result["epochs"]] == [("one", 0.5), ("two", 0.75)]
    status, _, errors = penstock("report", tmp_path / "one", tmp_path)
    assert status == 2
    assert "run.json not found" in errors


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"kind": "step", "step": step, "loss": 1.5, "learning_rate": 1e-3, "seconds": 0.1}
        for step in range(first, last + 1)
    ]
