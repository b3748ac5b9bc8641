import json
from pathlib import Path

import pytest

from penstock.cli.main import main


def test_schedule_prints_drawing_bubble_and_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--json", str(tmp_path / "s.json")]) == 0
    printed = capsys.readouterr().out
    assert "device 0  F0 F1 F2 F3" in printed
    assert "bubble 27.3% simulated" in printed
    assert "bubble 27.3% by the formula (p-1) / (m+p-1)" in printed
    assert "microbatches in flight at the peak, by device: 4, 3, 2, 1" in printed
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["peak_in_flight"] == [4, 3, 2, 1]
    assert written["bubble"] == pytest.approx(written["bubble_by_formula"])


def test_a_schedule_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("F0 F1 B1 B0\nF0 F1 B1 B0\n")
    assert main(["schedule", str(file)]) == 0
    assert "peak, by device: 2, 2" in capsys.readouterr().out
    file.write_text("B0 F0\n")
    assert main(["schedule", str(file)]) == 2
    assert "does B0.0 before F0.0" in capsys.readouterr().err
    assert main(["schedule", "2f2b"]) == 2
    assert "'2f2b' is neither" in capsys.readouterr().err
