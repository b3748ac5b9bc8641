"""The timeline of plans: its rows and its table, alone and on the page of a traced run, in a real browser."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.plan.schedule.schedules import gpipe
from penstock.report.page.plan_figures import plans_figure, plans_lines, plans_table
from penstock.report.run_report import Report, TrainingReport, write_any_report
from penstock.report.training_measured import PlanTimeline, read_metrics
from penstock.tracing.trace import write_run
from tests.report import samples
from tests.report.test_hostile import PAYLOADS
from tests.report.test_page import asks_for_nothing, browser, can_be_read_without_seeing, fits_a_phone, opened
from tests.report.written_metrics import WHY, epoch, plan, trained, write_metrics

__all__ = ["browser"]


def timeline(folder: Path, lines: list[dict[str, Any]]) -> PlanTimeline:
    found = read_metrics(write_metrics(folder, lines))
    assert found is not None
    assert found.timeline is not None
    return found.timeline


def test_plans_figure_stacks_its_rows(tmp_path: Path) -> None:
    figure = plans_figure(timeline(tmp_path, trained()))
    frozen, bands, rates, accuracies = figure.data
    assert frozen["x"] == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 11.5]
    assert frozen["y"] == [0, 4, 7, 9, 10, 11, 11]
    assert bands["text"] == ["4 × 1", "2 × 2", "1 × 4<br>cached"]
    assert (bands["base"], bands["x"]) == ([-0.5, 0.5, 2.5], [1, 2, 9])
    assert bands["marker"]["pattern"]["shape"] == ["", "", "/"]
    assert rates["x"] == accuracies["x"] == list(range(12))
    assert rates["y"][:3] == [30.0, 64.0, 68.0]
    domains = [figure.layout[name]["domain"] for name in ("yaxis", "yaxis2", "yaxis3", "yaxis4")]
    assert [domains[0][1], domains[-1][0]] == [1.0, 0.0]
    assert all(above[0] > below[1] for above, below in pairwise(domains))
    assert "from 4 stages × 1 replica with 0 of 12 layers frozen to 1 stage × 4 replicas with 11" in figure.alt


@pytest.mark.parametrize("accuracy", [None, float("nan")])
def test_metrics_without_accuracy_have_no_row(tmp_path: Path, accuracy: float | None) -> None:
    figure = plans_figure(timeline(tmp_path, [plan(), epoch(0, accuracy=accuracy)]))
    assert len(figure.data) == 3
    assert "accuracy" not in figure.alt


def test_plans_figure_of_a_new_run(tmp_path: Path) -> None:
    figure = plans_figure(timeline(tmp_path, [plan()]))
    assert [trace["type"] for trace in figure.data] == ["scatter", "bar"]
    assert figure.layout["xaxis"]["range"] == [-0.5, 0.5]


def test_plans_table_has_a_row_per_epoch(tmp_path: Path) -> None:
    table = plans_table(timeline(tmp_path, trained()))
    assert table.columns == ("epoch", "frozen", "layers", "stages × replicas", "cached", "units/s", "accuracy",
                             "migrate s", "moved", "fill s", "why")  # fmt: skip
    assert table.rows[1] == (1, 4, 12, "2 × 2", "no", 64.0, 0.9 - 0.6 / 2, 0.8, "12.4 MB", 0.0, WHY)
    assert table.rows[6] == (6, 11, 12, "1 × 4", "yes", 204.0, 0.9 - 0.6 / 7, None, None, None, None)
    assert [row[0] for row in table.rows] == list(range(12))


def test_replaced_plan_has_a_row(tmp_path: Path) -> None:
    found = timeline(tmp_path, [plan(), plan(stages=2, replicas=2, why="the run goes on"), epoch(0)])
    assert [(row[0], row[3], row[5], row[-1]) for row in plans_table(found).rows] == [
        (0, "4 × 1", None, "the first plan"),
        (0, "2 × 2", 40.0, "the run goes on"),
    ]
    assert plans_figure(found).data[1]["text"] == ["2 × 2"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (trained(), [
            "12 epochs, from 4 stages × 1 replica with 0 of 12 layers frozen to 1 stage × 4 replicas with 11 of 12 "
            "layers frozen and cached. 30 images/s became 224.",
            "Plan changes took 1.6 s and moved 24.8 MB.", "Filling caches took 2.5 s.",
        ]),
        ([plan(), epoch(0)], ["1 epoch, 4 stages × 1 replica with 0 of 12 layers frozen."]),
    ],
)  # fmt: skip
def test_plans_are_described_in_words(tmp_path: Path, lines: list[dict[str, Any]], words: list[str]) -> None:
    assert plans_lines(timeline(tmp_path, lines)) == words


def test_page_without_a_trace_has_plans(browser: Any, tmp_path: Path) -> None:
    folder = write_metrics(tmp_path / "vit", trained())
    report = write_any_report(folder)
    assert isinstance(report, TrainingReport)
    assert report.lead[-1] == ("Elastic training is not traced, so there is no account of lost time.")
    assert {file.name for file in report.files} == {"report.html", "tables.md", "plans.csv", "epochs.csv"}
    page = opened(browser, folder / "report.html")
    assert page.find_element("css selector", "h1").text == "Training in vit"
    assert len(page.find_elements("css selector", "#figure-plans .barlayer .point")) == 3
    ticks = page.find_elements("css selector", "#figure-plans .xtick text")
    assert [tick.text for tick in ticks] == [str(number) for number in range(12)]
    asks_for_nothing(page)
    can_be_read_without_seeing(page, least=2)
    for dark in (False, True):
        fits_a_phone(page, dark)


def test_page_with_a_trace_has_plans_and_account(browser: Any, tmp_path: Path) -> None:
    run = samples.trained(gpipe(3, 4))
    write_run(tmp_path, run.facts, list(run.processes))
    lines = [plan(why=PAYLOADS[0]), epoch(0, unit=PAYLOADS[2]), plan(10, why=PAYLOADS[4]), epoch(1)]
    report = write_any_report(write_metrics(tmp_path, lines))
    assert isinstance(report, Report)
    assert [line.why for line in report.plans] == [PAYLOADS[0], PAYLOADS[4]]
    assert {"plans.csv", "account.csv", "trace.json"} <= {file.name for file in report.files}
    page = opened(browser, tmp_path / "report.html")
    sections = [section.get_attribute("id") for section in page.find_elements("css selector", "main section")]
    assert {"account", "timeline", "plans"} <= set(sections)
    assert page.execute_script("return document.ran === undefined")
    assert page.find_elements("css selector", "img, #payload, [onerror], [onload], [onclick], svg a") == []
    page.execute_script("Plotly.Fx.hover(document.getElementById('figure-plans'), [{curveNumber: 0, pointNumber: 0}])")
    words = page.execute_script("return document.querySelector('#plans').textContent")
    assert PAYLOADS[0] in words
    asks_for_nothing(page)
