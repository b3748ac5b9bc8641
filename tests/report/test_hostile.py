"""Names of hosts, devices, models and cuts are text: whatever stands in them, nothing runs and everything is drawn."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.plan.schedule.schedules import gpipe
from penstock.report.bench_page import write_bench_page
from penstock.report.page.page import Text, make_page
from penstock.report.page.tables import Table
from penstock.report.run_report import write_report
from penstock.tracing.trace import Run, write_run
from tests.report.samples import streamed, trained
from tests.report.test_page import asks_for_nothing, browser, opened

__all__ = ["browser"]

PAYLOADS = (
    "</SCRIPT><img src=x onerror=document.ran=1>",
    "<script>document.ran=2</script><!--<script>",
    "<svg onload=document.ran=3><style>body{display:none}</style>",
    "<a href='javascript:document.ran=4' id=payload>$\\frac$</a>",
    "'\"><b id=payload onclick=document.ran=5>\u2028\u2029%{customdata}",
    "&lt;img src=x onerror=document.ran=6&gt;",
    "=cmd|' /C calc'!A0\x1b[2J\x00",
)


def hostile(run: Run) -> Run:
    """The same run of devices, hosts, cuts and a model that somebody named so."""

    def names(count: int, first: int) -> tuple[str, ...]:
        return tuple(f"{PAYLOADS[(first + at) % len(PAYLOADS)]}{at}" for at in range(count))

    devices = names(len(run.processes), 0)
    facts = replace(
        run.facts, model=PAYLOADS[1], devices=devices, hosts=names(len(run.processes), 2),
        cuts=names(len(run.facts.cuts), 3), environment={PAYLOADS[0]: PAYLOADS[2]},
    )  # fmt: skip
    processes = [replace(p, device=name) for p, name in zip(run.processes, devices, strict=True)]
    return Run(facts, tuple(processes))


def pages(folder: Path) -> dict[str, Path]:
    """A page of each kind."""
    made = {}
    runs = {"stream": streamed(num=20, compute_s=(0.01, 0.02, 0.01)), "training": trained(gpipe(3, 4))}
    for kind, run in runs.items():
        (folder / kind).mkdir()
        write_run(folder / kind, hostile(run).facts, list(hostile(run).processes))
        write_report(folder / kind)
        made[kind] = folder / kind / "report.html"
    rows: list[tuple[dict[str, Any], Run | None]] = [
        ({"mode": "serial", "stages": 1, "policy": None, "runtime": "eager", "images_per_second": 25.0, "speedup": 1.0,
          "bit_equal": True},
         None)]  # fmt: skip
    for payload in PAYLOADS[:3]:
        rows.append(({
            "mode": "pipeline", "stages": 3, "policy": payload, "runtime": payload, "images_per_second": 50.0,
            "speedup": 2.0,
            "bit_equal": True, "efficiency": None, "cuts": [payload, payload], "shares": [0.3, 0.3, 0.4],
            "crossing_bytes": [1000, 1000],
        }, hostile(runs["stream"])))  # fmt: skip
    made["bench"] = write_bench_page(folder / "bench.html", {"model": PAYLOADS[0], PAYLOADS[1]: PAYLOADS[2]}, rows)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return pages(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("kind", ["stream", "training", "bench"])
def test_hostile_names_run_no_script(browser: Any, made: dict[str, Path], kind: str) -> None:
    from selenium.webdriver.common.keys import Keys

    page = opened(browser, made[kind])
    figures = page.find_elements("css selector", ".figure")
    assert len(figures) >= 3
    assert all(figure.find_elements("css selector", "svg.main-svg") for figure in figures)
    if kind != "bench":
        line = page.find_element("id", "figure-timeline")
        line.send_keys(Keys.ARROW_RIGHT)
        journey = page.find_element("id", "journey")
        assert "microbatch 0" in journey.text
        if kind == "training":
            assert PAYLOADS[0] in journey.text, "the name stands there as it was given"
            assert [child.tag_name for child in journey.find_elements("css selector", "*")] == ["br"] * 6
        page.execute_script(
            "const d = document.getElementById('figure-timeline');"
            "Plotly.Fx.hover(d, [{curveNumber: d.data.length - 1, pointNumber: 0}]);"
        )
        assert page.find_elements("css selector", "#figure-timeline .hoverlayer .hovertext")
    assert page.execute_script("return document.ran === undefined")
    assert page.execute_script("return getComputedStyle(document.body).display") == "block"
    strange = "img, #payload, [onerror], [onload], [onclick], svg a, main style, a[href^='javascript'], h1 *, p.lead *"
    assert page.find_elements("css selector", strange) == []
    # three of the page's own, and the data
    assert len(page.find_elements("css selector", "script")) == 4
    words = page.execute_script("return document.body.textContent")
    assert PAYLOADS[0] in words
    assert PAYLOADS[2] in words
    asks_for_nothing(page)  # nor is there a violation of the page's policy in the log


def test_figures_show_hostile_names_as_text(browser: Any, made: dict[str, Path]) -> None:
    page = opened(browser, made["stream"])
    rows = [tick.text for tick in page.find_elements("css selector", "#figure-timeline .ytick text")]
    assert any("<script>document.ran=2</script>" in row for row in rows), rows


@pytest.mark.parametrize("kind", ["stream", "training", "bench"])
def test_the_policy_allows_no_inline_code(made: dict[str, Path], kind: str) -> None:
    text = made[kind].read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert "unsafe" not in policy
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    unquoted = re.sub(r'"[^"]*"', "", text.partition('<script type="application/json"')[0])
    assert re.findall(r"<[^>]* (?:style|on[a-z]+)=", unquoted) == []
    (data,) = re.findall(r'(?s)id="figures">(.*?)</script>', text)
    assert not set("<>&\u2028\u2029") & set(data)
    assert isinstance(json.loads(data), list)


def test_the_scripts_digests_are_those_of_the_page() -> None:
    table = Table("t", "T", ("a",), (("x",),))
    first, second = (make_page(title, [], [], [table], [Text("k", "K", ["one"])]) for title in ("a", "b"))
    nonces = [re.findall(r'<style nonce="([^"]+)"', text)[0] for text in (first, second)]
    assert nonces[0] != nonces[1], "a name cannot know it"


@pytest.mark.parametrize("kind", ["stream", "training"])
def test_files_for_papers_and_spreadsheets(made: dict[str, Path], kind: str) -> None:
    folder = made[kind].parent
    lines = (folder / "tables.md").read_text().splitlines()
    assert not [line for line in lines if re.search(r"<(?!/?sub)", line)], "HTML in Markdown"
    heads = {line.count("|") for line in lines if line.startswith("| cause")}
    assert heads == {4}
    for block in "\n".join(lines).split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) <= 1, "a name ends a cell"
    for file in folder.glob("*.csv"):
        for row in csv.reader(file.open(newline="")):
            assert not [cell for cell in row if re.match(r"[=@\t\r]|[+-](?!\d)", cell)], file
