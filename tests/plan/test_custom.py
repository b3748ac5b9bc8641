"""Schedules as people write them, as the verb draws them, and as it writes them; what cannot run is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.errors import PlanError, UsageError
from penstock.plan.schedule.custom import check_schedule, draw, read_schedule
from penstock.plan.schedule.schedules import SCHEDULES, Action, make_schedule, text


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


def test_written_schedule_reads_back() -> None:
    written = "F0.0 F1.0 B0.0 I1.0 W1.0 S.0 U.0"
    assert text(read_schedule(written)[0]) == written
    assert read_schedule("# mine\n\nF0 B0 # one\nF0.2 F0.1") == (
        (Action("F", 0, 0), Action("B", 0, 0)),
        (Action("F", 0, 2), Action("F", 0, 1)),
    )


@pytest.mark.parametrize("word", ["X0", "F", "S0.1", "F0.", "f0", "F0.1.2", "F-1"])
def test_unknown_action_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="is not an action; write a kind"):
        read_schedule(f"F0 {word}")


def test_an_empty_schedule() -> None:
    with pytest.raises(UsageError, match="the schedule is empty"):
        read_schedule("# nothing")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("B0 F0", "does B0.0 before F0.0"),
        ("F0 W0 I0", "does W0.0 before I0.0"),
        ("F0 F0 B0", "does F0.0 twice"),
        ("F0 B0 F1", "on stage 0; got 0 B, 0 I and 0 W"),
        ("F0 B0 I0", "got 1 B, 1 I and 0 W"),
        ("F0 B0 F2 B2", "without gaps"),
        ("F0 F1 B0 S.0 B1", "does S.0 before the stage's last backward"),
        ("F0 B0 F0.1 B0.1 \n F0.1", "stage 1 is on device 0 and on device 1"),
        ("F0 B0 \n F0.2 B0.2", "stage 1 is assigned to no device; .* from 0 to 2"),
        ("F0 F1 B0 B1 \n F0 B0", "F1.1 is missing"),
        ("F0 F1 B0 B1 \n F1 F0 B0 B1", "sends the activations of microbatch 0, but stage 1 expects those of 1"),
        ("F0 F1 B0 B1 \n F0 F1 B1 B0", "stage 1 sends the gradients of microbatch 1, but stage 0 expects those of 0"),
        ("F0 B0 F1 B1 \n F0 F1 B0 B1", "device 0 is at B0.0, device 1 is at F1.1"),
    ],
)
def test_broken_rules_of_schedules_are_named(written: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_schedule(read_schedule(written))


def test_a_users_own_schedule() -> None:
    assert check_schedule(read_schedule("F0 F1 B1 B0 \n F0 F1 B1 B0")).peak_in_flight == (2, 2)
    assert check_schedule(read_schedule("F0 F1 \n F0 F1")).peak_in_flight == (2, 2)  # inference
