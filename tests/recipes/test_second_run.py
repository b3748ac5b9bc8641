"""A second run in one folder: at the same time, with other settings, or over what a crash has left."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.recipes.launch import fit
from penstock.recipes.metrics import LOCK
from penstock.recipes.settings import SETTINGS, FitSettings, check_resumed
from tests.processes import PROGRAMS
from tests.recipes.test_fit import lines, settings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A folder in which another process trains."""
    command = [sys.executable, str(PROGRAMS / "held_folder.py"), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield tmp_path / "run", process
        process.kill()


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"stages": 2}])
def test_a_folder_holds_one_run_at_a_time(held: tuple[Path, subprocess.Popen[bytes]], more: dict[str, Any]) -> None:
    folder, process = held
    with pytest.raises(UsageError) as caught:
        fit(settings(folder, steps=1, **more))
    assert f"process {process.pid} " in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == [LOCK]


def test_the_lock_of_a_process_that_was_killed_is_free(held: tuple[Path, subprocess.Popen[bytes]]) -> None:
    folder, process = held
    process.kill()
    process.wait()
    fit(settings(folder, steps=1, save=False, validate=False))
    assert len(lines(folder, "step")) == 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"batch_size": 10}, "batch_size"), ({"seed": 3}, "seed"), ({"data": "elsewhere"}, "data"),
        ({"num_rows": 100}, "num_rows"), ({"optimizer": "sgd"}, "optimizer"),
        ({"lr_schedule": "cosine"}, "lr_schedule"), ({"model": "timm:resnet18"}, "model"),
        ({"validation": "digits"}, "validation"),
    ],
)  # fmt: skip
def test_resumed_run_keeps_its_settings(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    before = settings(tmp_path)
    with pytest.raises(UsageError) as caught:
        check_resumed(before.replace(**changes), before)
    assert name in str(caught.value)


def test_paths_that_lead_to_one_file_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    before = settings(tmp_path, data="text.txt")
    assert check_resumed(before.replace(data=str(tmp_path / "text.txt")), before) == []
    assert check_resumed(before.replace(stages=2, processes=None, schedule="gpipe"), before) == []


def rates(folder: Path, given: FitSettings) -> list[float]:
    """Train, and return the learning rate of each new step."""
    before = len(lines(folder, "step")) if given.resume else 0
    fit(given.replace(output=str(folder)))
    return [line["learning_rate"] for line in lines(folder, "step")[before:]]


def test_changed_learning_rate_is_applied_and_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = settings(tmp_path, steps=3, validate=False)
    assert rates(tmp_path / "a", given) == [1e-3] * 3
    assert rates(tmp_path / "a", given.replace(steps=5, lr=1e-4, resume=True)) == [1e-4] * 2
    said = capfd.readouterr().err.replace("\n", " ")
    assert "lr 0.0001 instead of 0.001" in said
    assert "steps 5 instead of 3" in said


def test_a_cosine_goes_on_along_the_curve_that_is_asked_for(tmp_path: Path) -> None:
    given = settings(tmp_path, lr_schedule="cosine", validate=False)
    whole = rates(tmp_path / "whole", given.replace(steps=8))
    rates(tmp_path / "parts", given.replace(steps=3))
    rest = rates(tmp_path / "parts", given.replace(steps=8, resume=True))
    assert rest == pytest.approx(whole[3:])
    faster = rates(tmp_path / "other", given.replace(steps=8, lr=2e-3))
    rates(tmp_path / "changed", given.replace(steps=3))
    assert rates(tmp_path / "changed", given.replace(steps=8, lr=2e-3, resume=True)) == pytest.approx(faster[3:])


def test_damaged_lines_of_metrics_are_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    fit(settings(folder, steps=3, validate=False))
    file = folder / "metrics.jsonl"
    good = file.read_text().splitlines()
    damaged = ["{", "[]", '{"step": "x"}', "\x00\x01", "[" * 100_000, '{"kind": "step"}']
    file.write_bytes("\n".join([good[0], *damaged, *good[1:], '{"kind": "st']).encode() + b"\xff\n" + b"{half")
    fit(settings(folder, steps=5, validate=False, resume=True))
    assert [line["step"] for line in lines(folder, "step")] == [1, 2, 3, 4, 5]
    assert "damaged lines" in capfd.readouterr().err.replace("\n", " ")


def test_settings_are_written_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(settings(folder, steps=1, validate=False))
    assert json.loads((folder / SETTINGS).read_text())["steps"] == 1
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("more", [{}, {"stages": 2}])
def test_a_refused_run_leaves_the_one_that_is_there(tmp_path: Path, more: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    fit(settings(folder, steps=1, validate=False, **more))
    (folder / "result.json").write_text("kept")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != LOCK}
    for changes in ({}, {"resume": True, "seed": 5}):
        with pytest.raises(UsageError):
            fit(settings(folder, steps=2, validate=False, **more, **changes))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != LOCK} == before
