"""The account of trainings whose losses are known, because they were put in, and their merged trace."""

import math
from typing import Any

import pytest

from penstock.errors import DataError
from penstock.plan.schedule.schedules import gpipe, zero_bubble
from penstock.report.page.chrome import chrome_trace
from penstock.report.run_report import training_contents
from penstock.report.stream_account import Account
from penstock.report.training_account import make_training_account
from penstock.report.training_measured import measure_training
from tests.report.samples import ALONE_S, trained
from tests.report.test_chrome import check_format, rows_of


def check(*causes: str, **settings: Any) -> Account:
    """Account for GPipe's steps; only the causes that were put in, and the bubble, cost anything."""
    run = trained(gpipe(4, 4), **settings)
    account = make_training_account(run, measure_training(run))
    assert account.num_times == pytest.approx(4.0)
    assert math.isclose(account.num_times - sum(line.times for line in account.lines), account.speedup, rel_tol=1e-12)
    assert all(line.why for line in account.lines)
    for line in account.lines:
        assert line.key in {"bubble", *causes} or line.times == pytest.approx(0.0, abs=1e-9), line
    return account


def test_the_bubble_is_the_formulas() -> None:
    assert check().times("bubble") == pytest.approx(4 - 4 * 4 / 7)


@pytest.mark.parametrize(
    ("cause", "settings"),
    [
        ("imbalance", {"stage_s": (0.01, 0.02, 0.01, 0.01)}),
        ("update", {"update_s": (0.2, 0.0, 0.0, 0.0)}),
        ("loading", {"load_s": 0.2}),
        ("synchronization", {"sum_s": 0.2}),
        ("communication", {"wire_s": 0.05}),
        ("slower", {"slower": 3.0}),
    ],
)
def test_simulated_cause_is_found_in_the_account(cause: str, settings: dict[str, Any]) -> None:
    account = check(cause, **settings)
    assert account.times(cause) > 0.2
    if cause in {"loading", "synchronization"}:  # so much more for each step of 21 forwards
        step_s = 21 * ALONE_S
        expected = 4 * 12 * ALONE_S * (1 / step_s - 1 / (step_s + 0.2))
        assert account.times(cause) == pytest.approx(expected)


def test_the_optimizers_step_is_work() -> None:
    account = check(update_s=0.1)  # each device updates a quarter of the weights
    assert account.baseline_s == pytest.approx(4 * (12 * ALONE_S + 0.1))


def test_a_trace_without_two_steps_is_refused() -> None:
    with pytest.raises(DataError, match="fewer than two steps"):
        measure_training(trained(gpipe(2, 2), num_steps=1))


def test_steps_are_drawn_as_textbooks_do() -> None:
    document = chrome_trace(trained(gpipe(4, 4), num_steps=2))
    check_format(document)
    for stage, spans in rows_of(document).items():
        names = [name for _, name in sorted(spans)]
        assert names == 2 * [*(f"F{m}" for m in range(4)), *(f"B{m}" for m in range(4))]
        # F(i, j) begins in tick i + j
        assert [round(begin / ALONE_S) for begin, _ in sorted(spans)[:4]] == [stage + m for m in range(4)]
    arrows = [event for event in document["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 2 * 2 * 3 * 4  # steps, directions, cuts, microbatches


def test_the_page_shows_halves_and_says_which_schedule_is_quicker() -> None:
    contents = training_contents(trained(zero_bubble(3, 6)))
    figure = next(figure for figure in contents.figures if figure is not None and figure.key == "timeline")
    assert {"F0", "I0", "W0"} <= set(figure.data[-1]["text"])
    assert figure.journeys[0].startswith("step 2, microbatch 0<br>stage 0 on board0: F 10 ms")
    quicker = training_contents(trained(gpipe(4, 4))).advice.to_do
    assert any("zero-bubble" in line and "more rows/s by the simulator" in line for line in quicker)
    assert not any("1f1b and 4 microbatches" in line for line in quicker), "1F1B has the bubble of GPipe"
