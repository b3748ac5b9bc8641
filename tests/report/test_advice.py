"""Advice is given where it is faster by more than the planner's own error, which the run itself shows."""

import re

import pytest

from penstock.report.advice import advise
from penstock.report.stream_account import make_account
from penstock.report.stream_measured import measure_stream
from penstock.tracing.trace import Run
from tests.report.samples import streamed


def numbers(run: Run) -> tuple[tuple[str, ...], float, float]:
    """What is advised, and how many rows/s are predicted for the run as it was and measured."""
    stream = measure_stream(run)
    lines = advise(run, stream, make_account(run, stream)).lines
    match = re.search(r"([\d.]+) are predicted for this run and ([\d.]+) were measured", lines[1])
    assert match is not None, lines[1]
    return lines, float(match[1]), float(match[2])


def test_a_pipeline_that_is_balanced_is_left_as_it_is() -> None:
    lines, predicted, measured = numbers(streamed(num=100))
    assert predicted == pytest.approx(measured, rel=0.05)
    assert "the cuts would be" not in lines[1]


def test_unbalanced_pipeline_gets_better_cuts() -> None:
    lines, predicted, measured = numbers(streamed(num=100, compute_s=(0.010, 0.030, 0.010, 0.010)))
    assert predicted == pytest.approx(measured, rel=0.05)
    assert "the cuts would be" in lines[1]
    gain = float(re.search(r"\(\+([\d.]+)%\)", lines[1])[1])  # type: ignore[index]
    assert gain > 100 * abs(predicted / measured - 1)


def test_run_unlike_its_prediction_gets_no_advice() -> None:
    """Steps that take five times what they take alone: what the planner says of it is that far off."""
    lines, predicted, measured = numbers(streamed(num=60, wire_s=0.05))
    error = abs(predicted / measured - 1)
    for line in lines[1:]:
        for gain in re.findall(r"\(\+([\d.]+)%\)", line):
            assert float(gain) / 100 > error or "not worth" in line
