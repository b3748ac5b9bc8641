"""Schedules as people write them, as the verb draws them, and as it writes them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.errors import UsageError
from penstock.plan.schedule.picture import draw, read_schedule
from penstock.plan.schedule.schedules import SCHEDULES, make_schedule


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 6))
def test_a_drawing_is_a_schedule(name: str, devices: int, microbatches: int) -> None:
    stages = 2 * devices if name == "interleaved" else devices
    microbatches = devices * microbatches if name == "interleaved" else microbatches
    schedule = make_schedule(name, stages, microbatches, devices)
    assert read_schedule(draw(schedule)) == schedule
    assert read_schedule(f"\n{draw(schedule)}\nbubble 27.3% simulated\nmicrobatches in flight: 1\n") == schedule


def test_written_schedule_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, drawing = tmp_path / "mine.json", tmp_path / "mine.txt"
    assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "3", "--json", str(json_file)]) == 0
    printed = capsys.readouterr().out
    drawing.write_text(printed)
    for file in (json_file, drawing):
        assert main(["schedule", str(file)]) == 0
        assert capsys.readouterr().out.splitlines()[:3] == printed.splitlines()[:3]


@pytest.mark.parametrize(
    "text", ["{", "{}", json.dumps({"devices": [1]}), json.dumps({"devices": []}), json.dumps({"devices": ["F0 X1"]})]
)
def test_unrelated_json_is_refused_as_schedule(text: str) -> None:
    with pytest.raises(UsageError):
        read_schedule(text)
