"""The merged trace: by the rules of the format, and as textbooks draw pipelines."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from penstock.plan.schedule.custom import clock_cycles
from penstock.plan.schedule.schedules import Schedule, gpipe, one_f_one_b
from penstock.report.page.chrome import chrome_trace
from tests.report.samples import simulated, streamed


def check_format(document: dict[str, Any]) -> None:
    """The rules of the Trace Event Format for the phases that are used here."""
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] in {"ms", "ns"}
    json.loads(json.dumps(document, allow_nan=False))
    flows: dict[str, Counter[int]] = {"s": Counter(), "f": Counter()}
    for event in document["traceEvents"]:
        assert {"name", "ph", "pid"} <= set(event)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name", "thread_sort_index"}
            assert event["args"]
            continue
        assert isinstance(event["ts"], float)
        assert event["ph"] in {"X", "C", "s", "f"}
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] in flows:
            flows[event["ph"]][event["id"]] += 1
            assert event["ph"] == "s" or event["bp"] == "e"
    assert flows["s"] == flows["f"]
    assert set(flows["s"].values()) <= {1}, "an arrow has one beginning and one end"
    starts = {e["id"]: e["ts"] for e in document["traceEvents"] if e["ph"] == "s"}
    assert all(starts[e["id"]] <= e["ts"] for e in document["traceEvents"] if e["ph"] == "f")


def rows_of(document: dict[str, Any]) -> dict[int, list[tuple[float, str]]]:
    """What each row computes, by the second at which it begins."""
    rows: dict[int, list[tuple[float, str]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "compute":
            rows.setdefault(event["tid"], []).append((event["ts"] / 1e6, event["name"]))
    return rows


@pytest.mark.parametrize("schedule", [gpipe(4, 4), gpipe(3, 5), one_f_one_b(4, 8)])
def test_schedule_matches_the_textbook_picture(schedule: Schedule) -> None:
    document = chrome_trace(simulated(schedule))
    check_format(document)
    rows = rows_of(document)
    for tick, column in enumerate(clock_cycles(schedule)):
        for device, action in enumerate(column):
            if action is not None:
                began = [name for begin, name in rows[device] if begin <= tick]
                assert began[-1] == f"{action.kind}{action.microbatch}", (tick, device)
    # forward of microbatch j on stage i begins in tick i + j, the diagonal of GPipe's figure
    if schedule == gpipe(4, 4):
        for i in range(4):
            assert rows[i][:4] == [(float(i + j), f"F{j}") for j in range(4)]


def test_arrows_follow_activations_and_gradients() -> None:
    document = chrome_trace(simulated(gpipe(3, 2)))
    arrows = [e for e in document["traceEvents"] if e["ph"] in {"s", "f"}]
    pairs: dict[int, dict[str, int]] = {}
    for event in arrows:
        pairs.setdefault(event["id"], {})[event["ph"]] = event["tid"]
    assert Counter((p["s"], p["f"]) for p in pairs.values()) == {(0, 1): 2, (1, 2): 2, (2, 1): 2, (1, 0): 2}


def test_a_stream_has_a_row_for_each_stage_and_for_feeding() -> None:
    document = chrome_trace(streamed(num=5, wire_s=0.001))
    check_format(document)
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert names == {s: f"stage {s} on board{s}" for s in range(4)} | {4: "loading", 6: "results"}
    for row, spans in rows_of(document).items():
        assert [name for _, name in spans] == [f"F{m}" for m in range(5)], row
        assert all(a < b for (a, _), (b, _) in pairwise(spans))
    colors = {e["name"]: e["cname"] for e in document["traceEvents"] if e.get("cat") == "compute"}
    assert len(set(colors.values())) == 5
