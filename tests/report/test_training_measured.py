"""Steps, epochs and plans as the lines of a training's metrics say, in order of steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DataError
from penstock.report.training_measured import EpochLine, PlanTimeline, StepLine, read_metrics
from tests.report.written_metrics import epoch, plan, trained, write_metrics


def timeline(tmp_path: Path, lines: list[dict[str, Any]]) -> PlanTimeline:
    metrics = read_metrics(write_metrics(tmp_path, lines))
    assert metrics is not None
    assert metrics.timeline is not None
    return metrics.timeline


def spans(tmp_path: Path, lines: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Of each plan the frozen layers, and the epochs that it was for."""
    return [(span.plan.frozen_layers, span.begin, span.end) for span in timeline(tmp_path, lines).spans()]


def test_metrics_of_a_training_are_read(tmp_path: Path) -> None:
    found = timeline(tmp_path, trained())
    assert [line.frozen_layers for line in found.plans] == [0, 4, 7, 9, 10, 11]
    assert found.epochs[0] == EpochLine(
        epoch=0, step=10, unit="images", units_per_s=30.0, train_loss=1.5, validation_loss=1.2, accuracy=0.9 - 0.6
    )
    assert len(found.epochs) == 12


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([plan()], [(0, 0, 1)]),
        ([plan(), epoch(0)], [(0, 0, 1)]),
        ([plan(), epoch(0), plan(10, frozen_layers=4)], [(0, 0, 1), (4, 1, 2)]),  # for an epoch that still runs
        ([plan(), epoch(0), plan(10, frozen_layers=4), epoch(1), epoch(2)], [(0, 0, 1), (4, 1, 3)]),
        # the same plan again where a run goes on, and another one in the middle of an epoch
        (
            [plan(), epoch(0), plan(10, frozen_layers=4), plan(10, frozen_layers=4), epoch(1)],
            [(0, 0, 1), (4, 1, 1), (4, 1, 2)],
        ),
        ([plan(), epoch(0), plan(15, frozen_layers=4), epoch(1)], [(0, 0, 1), (4, 1, 2)]),
        # of a run that went on only its new lines
        ([plan(30, epoch=3, frozen_layers=7), epoch(3)], [(7, 3, 4)]),
        ([plan(30, epoch=3, frozen_layers=7)], [(7, 3, 4)]),
    ],
)
def test_timeline_has_the_epochs_of_each_plan(tmp_path: Path, lines: list[dict[str, Any]], found: list[Any]) -> None:
    assert spans(tmp_path, lines) == found


def test_without_plans_there_is_no_timeline(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) is None
    found = read_metrics(write_metrics(tmp_path, [{"kind": "step", "step": 1, "loss": 1.5, "seconds": 2.0}, epoch(0)]))
    assert found is not None
    assert found.timeline is None
    assert found.steps == (StepLine(step=1, loss=1.5),)


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    with (write_metrics(tmp_path, [plan(), epoch(0)]) / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "plan", "st')
    found = read_metrics(tmp_path)
    assert found is not None
    assert (len(found.plans), len(found.epochs)) == (1, 1)


def test_nan_losses_are_read(tmp_path: Path) -> None:
    nan = float("nan")
    lines = [plan(), {"kind": "step", "step": 1, "loss": nan}, epoch(0, train_loss=nan, accuracy=nan)]
    assert spans(tmp_path, lines) == [(0, 0, 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not a line of metrics"),
        ("[1]", "is not a line of metrics"),
        ("[" * 100_000, "is not a line of metrics"),
        (json.dumps(plan(stages=0)), r"is not a line of kind plan \(Expected `int` >= 1 - at `\$\.stages`\)"),
        (json.dumps(plan(migrate_s=float("inf"))), "is not a line of kind plan"),
        (json.dumps(plan(epoch=2**60)), "is not a line of kind plan"),
        (json.dumps({"kind": "plan", "step": 1}), "is not a line of kind plan .*missing required field `epoch`"),
        (json.dumps(epoch(0, rate="quick")), "is not a line of kind epoch"),  # type: ignore[arg-type]
    ],
)
def test_invalid_metrics_lines_are_refused(tmp_path: Path, line: str, message: str) -> None:
    file = write_metrics(tmp_path, [plan()]) / "metrics.jsonl"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(DataError, match=message) as error:
        read_metrics(tmp_path)
    assert str(error.value).startswith(f"line 2 of {file} is not a line")
    assert str(error.value).endswith("remove it, or copy the file again")


def test_metrics_in_another_encoding_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read"):
        read_metrics(tmp_path)
