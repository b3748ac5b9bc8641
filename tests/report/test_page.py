"""The page in a real browser: it draws, it tells of microbatches, and it asks nobody for anything."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.report.bench_page import write_bench_page
from penstock.report.page.figures import LOAD, LOST, MOVE, PALETTE, SYNCHRONIZE, UPDATE, WAIT
from penstock.report.run_report import Report, write_report
from penstock.tracing.trace import Run, write_run
from tests.browsers import browser_session
from tests.report.samples import streamed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    folder = tmp_path_factory.mktemp("run")
    run = streamed(num=30, compute_s=(0.010, 0.014, 0.010, 0.010), wire_s=0.002)
    write_run(folder, run.facts, list(run.processes))
    return folder, write_report(folder)


def test_report_writes_files_and_tables(made: tuple[Path, Report]) -> None:
    folder, report = made
    names = {file.name for file in report.files}
    assert names >= {"report.html", "trace.json", "tables.md", "account.csv", "links.csv"}
    assert all(file.stat().st_size > 20 for file in report.files)
    rows = [line.split(",") for line in (folder / "account.csv").read_text().splitlines()]
    times = {row[0]: float(row[1]) for row in rows[1:]}
    measured = times.pop("measured")
    assert sum(times.values()) == pytest.approx(measured)
    stages = (folder / "stages.csv").read_text().splitlines()
    assert stages[2].startswith("1,board1,blocks.0:after to blocks.1:after,14 ms,14 ms")
    assert "the cuts would be" in report.advice[1]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_session() as driver:
        yield driver


@pytest.fixture(scope="module")
def page(browser: Any, made: tuple[Path, Report]) -> Any:
    return opened(browser, made[0] / "report.html")


def opened(browser: Any, file: Path) -> Any:
    """Open a page and wait until it is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get("about:blank")
    for kind in ("performance", "browser"):  # of pages before this one
        browser.get_log(kind)
    browser.get(file.as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.find_element("css selector", "body").get_attribute("data-drawn"))
    return browser


def test_page_draws_every_figure_without_requests(page: Any) -> None:
    figures = page.find_elements("css selector", ".figure")
    assert [figure.get_attribute("id").removeprefix("figure-") for figure in figures][:4] == [
        "account", "timeline", "loads", "throughput",
    ]  # fmt: skip
    assert all(figure.find_elements("css selector", "svg.main-svg") for figure in figures)
    assert not page.find_elements("css selector", ".modebar-btn"), "a toolbar over a figure"
    asks_for_nothing(page)


def test_advice_is_shown_if_there_is_any(made: tuple[Path, Report], tmp_path: Path) -> None:
    run = streamed(num=60, wire_s=0.05)  # which the planner does not understand
    write_run(tmp_path, run.facts, list(run.processes))
    assert len(write_report(tmp_path).advice) == 2
    found = [(folder / "report.html").read_text(encoding="utf-8") for folder in (made[0], tmp_path)]
    assert ['<section id="advice"' in page for page in found] == [True, False]
    assert "not worth trying" in found[1]


def test_no_microbatch_has_the_colour_of_another_activity() -> None:
    activities = {LOST, WAIT, MOVE, SYNCHRONIZE, UPDATE, LOAD}
    assert len(activities) == 6
    assert not activities & set(PALETTE)
    assert len(set(PALETTE)) == len(PALETTE)


def asks_for_nothing(page: Any) -> None:
    """The page is the only file that was asked for, and its script had nothing to complain of."""
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {url.partition(":")[0] for url in asked} <= {"file", "data", "blob"}, asked
    assert len([url for url in asked if url.startswith("file:")]) == 1
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_hovering_shows_the_times_of_a_microbatch(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    line = page.find_element("id", "figure-timeline")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", line)
    # the figure's own coordinates of the middle of F2 on stage 1
    place = page.execute_script(
        "const d = document.getElementById('figure-timeline'), t = d.data[2], l = d._fullLayout;"
        "const i = t.text.findIndex((x, n) => x === 'F2' && String(t.y[n]).startsWith('stage 1'));"
        "const r = d.getBoundingClientRect(), x = t.base[i] + t.x[i] / 2;"
        "return [r.left + l._size.l + l.xaxis.d2p(x), r.top + l._size.t + l.yaxis.d2p(t.y[i])].map(Math.round);"
    )
    actions = ActionChains(page)
    actions.w3c_actions.pointer_action.move_to_location(*place)
    actions.perform()
    journey = page.find_element("id", "journey")
    assert journey.text.startswith("microbatch 2: loaded in")
    assert "stage 3: computes 10 ms" in journey.text
    line.send_keys(Keys.ARROW_RIGHT)
    assert journey.text.startswith("microbatch 0: loaded in")


def test_page_is_readable_by_screen_readers(page: Any) -> None:
    can_be_read_without_seeing(page, least=8)


def can_be_read_without_seeing(page: Any, least: int) -> None:
    """Landmarks, words for every figure, a table or a list in every section, links to all of them."""
    assert page.find_element("css selector", "html").get_attribute("lang") == "en"
    for landmark in ("header", "nav", "main"):
        assert len(page.find_elements("css selector", landmark)) == 1
    for figure in page.find_elements("css selector", ".figure"):
        assert len(figure.get_attribute("aria-label")) > 30
    sections = page.find_elements("css selector", "main section")
    assert len(sections) >= least
    for section in sections:
        assert section.find_elements("css selector", "table, ul"), section.get_attribute("id")
    targets = [a.get_attribute("href").partition("#")[2] for a in page.find_elements("css selector", "nav a")]
    assert targets == [section.get_attribute("id") for section in sections]


@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_dark_mode_and_phones(page: Any, dark: bool) -> None:
    fits_a_phone(page, dark)


def test_a_comparison_of_benchs_rows(browser: Any, tmp_path: Path) -> None:
    serial = {"mode": "serial", "stages": 1, "policy": None, "runtime": "eager", "images_per_second": 25.0,
              "speedup": 1.0, "bit_equal": True}  # fmt: skip
    rows: list[tuple[dict[str, Any], Run | None]] = [(serial, None)]
    for stages, policy, seconds in (
        (2, "balanced", (0.02, 0.02)),
        (2, "equal-blocks", (0.016, 0.024)),
        (4, "balanced", (0.010,) * 4),
    ):
        run = streamed(num=30, compute_s=seconds)
        rate = run.facts.num_rows / run.facts.total_s
        shares = [part / sum(seconds) for part in seconds]
        rows.append(({
            "mode": "pipeline", "stages": stages, "policy": policy, "runtime": "eager",
            "images_per_second": rate, "speedup": rate / 25,
            "bit_equal": True, "efficiency": None, "cuts": [f"{policy}.{n}:after" for n in range(stages - 1)],
            "shares": shares, "crossing_bytes": [1000] * (stages - 1),
        }, run))  # fmt: skip
    page = opened(browser, write_bench_page(tmp_path / "bench.html", {"model": "a_model"}, rows))
    assert len(page.find_elements("css selector", ".figure svg.main-svg")) >= 3
    asks_for_nothing(page)
    can_be_read_without_seeing(page, least=6)
    words = page.find_element("id", "counts").text + page.find_element("id", "policies").text
    lost = 4 - 4 * 30 / 33
    assert f"{4 - lost:.2f} of 4.00 are reached and {lost:.2f} are lost: {lost:.2f} to fill and drain" in words
    assert "From 2 to 4 stages the speed-up changes by +1.70 for 2 more devices" in words
    slower = 1 - 31 * 0.020 / (0.016 + 30 * 0.024)
    assert f"equal-blocks is {slower:.1%} slower than balanced: it loses 0.33 times more to imbalance" in words
    assert "its slowest stage takes 24 ms alone, that of balanced 20 ms" in words
    assert "2 stages, equal-blocks, splits at equal-blocks.0:after" in words
    fits_a_phone(page, dark=True)


def fits_a_phone(page: Any, dark: bool) -> None:
    """Ink and paper differ in light and dark, and nothing is wider than a phone."""
    scheme = "dark" if dark else "light"
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    ink, paper = page.execute_script(
        "const s = getComputedStyle(document.body);"
        "return [s.color, s.backgroundColor].map(c => c.match(/\\d+/g).map(Number));"
    )
    assert abs(sum(ink[:3]) - sum(paper[:3])) > 450, "ink and paper are too much alike"
    assert (sum(paper[:3]) < 200) == dark
    width = page.execute_script("return document.documentElement.scrollWidth")
    assert width <= 400, "the page is wider than a phone"
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
