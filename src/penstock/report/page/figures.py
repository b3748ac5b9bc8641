"""The page's figures as plotly JSON; plotly's script is embedded in the page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from penstock.report.page.tables import INPUT, OUTPUT, Cell, Table, bounds_of
from penstock.report.stream_account import Account
from penstock.report.stream_measured import MeasuredStage, MeasuredStream, MicrobatchTimes
from penstock.tracing.trace import GenerationFacts, Run
from penstock.units import format_seconds

# distinguishable in light and dark, and with colour blindness (Okabe and Ito 2008, Tol 2021)
LOST, KEPT, WAIT, MOVE = "#d55e00", "#0072b2", "#b8b8b8", "#e69f00"
SYNCHRONIZE, UPDATE, LOAD = "#7f7f7f", "#333399", "#999933"
# colours for microbatches, devices and policies, used round-robin; none is used for other activities
PALETTE = (KEPT, "#009e73", "#cc79a7", "#56b4e9", "#882255", "#8c564b", "#117733")
COMPUTING = "computing, a colour for each microbatch"
# a browser draws about this many bars quickly; longer streams only repeat the pattern
MAX_DRAWN = 200
TEXT_INSIDE = {
    "textposition": "inside",
    "insidetextanchor": "middle",
    "textangle": 0,
    "constraintext": "none",
    "textfont": {"color": "#ffffff"},
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: a description for screen readers, plotly's data and layout, and its table.

    `journeys` are a timeline's descriptions of the microbatches.
    """

    key: str
    title: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    journeys: tuple[str, ...] = ()


def timeline(run: Run, stream: MeasuredStream) -> Figure:
    """Draw the activities of every stage over time: computing by microbatch, messages, waiting."""
    shown = min(stream.num_microbatches, MAX_DRAWN)
    journeys = [journey(stream, m, run.facts.generation) for m in range(shown)]
    data = [
        _bars("waiting", stream, shown, journeys, lambda step: (step.asked_s, step.arrived_s), WAIT),
        _bars("messages", stream, shown, journeys, lambda step: (step.arrived_s, step.end_s), MOVE),
        _computing(stream, shown, journeys),
    ]
    rows: list[tuple[Cell, ...]] = [(m, text.replace("<br>", "; ")) for m, text in enumerate(journeys)]
    more = f" The first {shown} of {stream.num_microbatches} microbatches." if shown < stream.num_microbatches else ""
    layout = timeline_layout("seconds", _first_view(stream), num_rows=len(stream.stages))
    table = Table("timeline", "Every microbatch's journey", ("microbatch", "journey"), tuple(rows))
    return Figure(
        "timeline",
        "Timeline",
        f"One row for each stage of {run.facts.model}, time from left to right; F and a number "
        f"is the forward of that microbatch.{more}",
        data,
        layout,
        table,
        tuple(journeys),
    )


def timeline_layout(title: str, view: list[float], *, num_rows: int) -> dict[str, Any]:
    """Return the layout of a timeline whose initial view is this range of seconds."""
    return {
        "barmode": "overlay",
        "bargap": 0.3,
        "hovermode": "closest",
        "dragmode": "pan",
        "xaxis": {"title": {"text": title}, "range": view},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "title": {"text": ""}},
        "height": 150 + 60 * num_rows,
        "uniformtext": {"minsize": 8, "mode": "hide"},
    }


def journey(stream: MeasuredStream, microbatch: int, generation: GenerationFacts | None = None) -> str:
    """Describe the path of a microbatch, stage by stage."""
    what = ""
    if generation is not None:
        kind, lane = generation.microbatches[microbatch]
        what = ", a prompt's chunk" if kind == "prompt" else f", a {kind} of lane {lane}"
    lines = [f"microbatch {microbatch}{what}: loaded in {format_seconds(stream.load_s[microbatch])}"]
    for stage, step in stream.steps_of(microbatch):
        waited = step.arrived_s - step.asked_s
        begin = step.begin_s - stream.begin_s
        lines.append(
            f"stage {stage.index}: computes {format_seconds(step.compute_s)} from {begin:.4f} s "
            f"(stage waited {format_seconds(max(0.0, waited))}, sent on after {format_seconds(step.buffer_s)})"
        )
    return "<br>".join(lines)


def _row(stage: MeasuredStage) -> str:
    return f"stage {stage.index}<br>{stage.device}"


def _bars(
    name: str,
    stream: MeasuredStream,
    shown: int,
    journeys: Sequence[str],
    ends: Callable[[MicrobatchTimes], tuple[float, float]],
    color: str,
) -> dict[str, Any]:
    spans = [
        (stage, step.microbatch, *ends(step))
        for stage in stream.stages
        for step in stage.steps
        if step.microbatch < shown
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "marker": {"color": color},
        "width": 0.35,
        "y": [_row(stage) for stage, _, _, _ in spans],
        "base": [round(a - stream.begin_s, 6) for _, _, a, _ in spans],
        "x": [round(max(0.0, b - a), 6) for _, _, a, b in spans],
        "customdata": [journeys[m] for _, m, _, _ in spans],
        "hovertemplate": "%{customdata}<extra>" + name + "</extra>",
    }


def _computing(stream: MeasuredStream, shown: int, journeys: Sequence[str]) -> dict[str, Any]:
    def ends(step: MicrobatchTimes) -> tuple[float, float]:
        return step.begin_s, step.begin_s + step.compute_s

    bars = _bars(COMPUTING, stream, shown, journeys, ends, KEPT)
    numbers = [step.microbatch for stage in stream.stages for step in stage.steps if step.microbatch < shown]
    bars |= {
        "width": 0.8,
        "text": [f"F{m}" for m in numbers],
        **TEXT_INSIDE,
        "marker": {"color": [PALETTE[m % len(PALETTE)] for m in numbers], "line": {"width": 0.5, "color": "#ffffff"}},
    }
    return bars


def _first_view(stream: MeasuredStream) -> list[float]:
    """Return the initial view: the filling of the pipeline and a little more; the user can pan to the rest."""
    few = min(stream.num_microbatches - 1, 4 * len(stream.stages))
    return [0.0, round(1.05 * (max(step.end_s for _, step in stream.steps_of(few)) - stream.begin_s), 4)]


def waterfall(account: Account, table: Table) -> Figure:
    """Draw the account, from n down to the measured speed-up."""
    names = ["devices together", *(line.title for line in account.lines), "measured"]
    values = [account.num_times, *(-line.times for line in account.lines), account.speedup]
    data = [{
        "type": "waterfall", "orientation": "h", "y": names, "x": [round(v, 4) for v in values],
        "measure": ["absolute", *("relative" for _ in account.lines), "total"],
        "text": [_signed(v) if 0 < i < len(values) - 1 else f"{v:.2f}" for i, v in enumerate(values)],
        "textposition": "outside", "customdata": ["", *(line.why for line in account.lines), ""],
        "hovertemplate": "%{y}: %{text}<br>%{customdata}<extra></extra>", "cliponaxis": False,
        "decreasing": {"marker": {"color": LOST}}, "increasing": {"marker": {"color": "#009e73"}},
        "totals": {"marker": {"color": KEPT}}, "connector": {"line": {"width": 1, "color": "#888888"}},
    }]  # fmt: skip
    most = max(accumulate(values[:-1]))
    layout = {
        "xaxis": {"title": {"text": "times one device"}, "range": [0, round(1.13 * most, 3)]},  # room for numbers
        "yaxis": {"autorange": "reversed"},
        "showlegend": False,
        "height": 90 + 28 * len(names),
    }
    alt = f"{account.num_times:.2f} times were possible, {account.speedup:.2f} were measured. " + " ".join(
        f"{line.title}: {_signed(-line.times)}." for line in account.lines
    )
    return Figure("account", "The account: why not n times", alt, data, layout, table)


def _signed(times: float) -> str:
    return f"{times:+.2f}" if abs(times) >= 5e-3 else "0.00"


def loads(run: Run, stream: MeasuredStream, table: Table) -> Figure:
    """Draw the seconds per microbatch of each stage, alone and additional, with the names of the cuts."""
    names = [
        f"stage {s.index}" + (f"<br>{_bounds(run, s.index)}" if _bounds(run, s.index) else "") for s in stream.stages
    ]
    stages = stream.stages
    alone = [s.alone_s * 1e3 for s in stages]
    parts = (
        ("alone", alone, KEPT),
        ("computing longer than alone", [max(0.0, 1e3 * (s.mean("compute_s") - s.alone_s)) for s in stages], LOST),
        ("messages", [s.mean("message_s") * 1e3 for s in stages], MOVE),
        ("waiting", [s.mean("wait_s") * 1e3 for s in stages], WAIT),
    )
    data = stacked(names, parts)
    layout = {
        "barmode": "stack",
        "height": 380,
        "yaxis": {"title": {"text": "ms per microbatch"}},
        "xaxis": {"automargin": True},
    }
    alt = "Seconds per microbatch of each stage: " + ", ".join(
        f"stage {s.index} {format_seconds(s.mean('compute_s'))}" for s in stream.stages
    )
    return Figure("loads", "What each stage does with its time", alt + ".", data, layout, table)


def stacked(names: Sequence[str], parts: Sequence[tuple[str, Sequence[float], str]]) -> list[dict[str, Any]]:
    """Draw a stacked bar for each name; each part has a name, milliseconds and a colour."""
    return [
        {
            "type": "bar",
            "name": name,
            "x": list(names),
            "y": [round(v, 4) for v in values],
            "marker": {"color": color},
            "hovertemplate": "%{x}: %{y:.3g} ms " + name + "<extra></extra>",
        }
        for name, values, color in parts
    ]


def _bounds(run: Run, stage: int) -> str:
    bounds = bounds_of(run, stage)
    if bounds is None:
        return ""
    first, last = (f"the {name}" if name in {INPUT, OUTPUT} else name for name in bounds)
    return f"from {first}<br>to {last}"


def throughput(run: Run) -> Figure:
    """Draw rows per second over time, averaged over a window of a few results."""
    moments = run.facts.results_s
    rows = run.facts.num_rows / max(1, run.facts.num_microbatches)
    window = max(1, min(len(moments) // 5, 20))
    points = [
        (moments[i], rows * window / (moments[i] - moments[i - window]))
        for i in range(window, len(moments))
        if moments[i] > moments[i - window]
    ]
    drawn = [(round(a, 4), b) for a, b in points]
    hover = "%{y:.4g} rows/s at %{x:.3g} s<extra></extra>"
    data, layout = rates(drawn, "lines", hover, "seconds", f"rows/s over {window} results")
    overall = run.facts.num_rows / run.facts.total_s
    cells: tuple[tuple[Cell, ...], ...] = tuple((round(a, 3), round(b, 2)) for a, b in points)
    table = Table("throughput", "Throughput over time", ("second", "rows/s"), cells)
    alt = f"{overall:.4g} rows per second over the whole run, fill and drain included."
    return Figure("throughput", "Throughput over time", alt, data, layout, table)


def rates(
    points: Sequence[tuple[float, float]], mode: str, hover: str, x_title: str, y_title: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return plotly's data and layout of one line of rates, from zero."""
    trace = {
        "type": "scatter",
        "mode": mode,
        "x": [x for x, _ in points],
        "y": [round(rate, 3) for _, rate in points],
        "line": {"color": KEPT},
        "hovertemplate": hover,
    }
    layout = {
        "height": 300,
        "xaxis": {"title": {"text": x_title}},
        "showlegend": False,
        "yaxis": {"title": {"text": y_title}, "rangemode": "tozero"},
    }
    return [trace], layout


def memory(run: Run) -> Figure | None:
    """Draw the memory of each process over time; None if it was not sampled."""
    origin = min((span.begin_s for span in run.spans), default=0.0)
    data: list[dict[str, Any]] = []
    rows: list[tuple[Cell, ...]] = []
    for place, process in enumerate(run.processes):
        seen = [c for c in process.counters if c.name == "memory_bytes"]
        if seen:
            rows.append((process.device, round(max(c.value for c in seen) / 1e6, 1)))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": process.device,
                    "x": [round(c.at_s - origin, 3) for c in seen],
                    "y": [round(c.value / 1e6, 2) for c in seen],
                    "line": {"color": PALETTE[place % len(PALETTE)]},
                }
            )
    if not data:
        return None
    layout = {
        "height": 300,
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"title": {"text": "MB"}, "rangemode": "tozero"},
    }
    table = Table("memory", "Peak memory", ("process", "MB"), tuple(rows))
    alt = "Memory of each process: " + ", ".join(f"{row[0]} {row[1]} MB at most" for row in rows) + "."
    return Figure("memory", "Memory", alt, data, layout, table)


# relative height of a row of `rows_of_axes`, the gap between rows, and the pixels of a height of 1
ROW, _GAP, _PIXELS = 1.0, 0.28, 130


def rows_of_axes(
    rows: Sequence[tuple[float, Sequence[dict[str, Any]], dict[str, Any]]], xaxis: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Place rows below each other over one x axis; a row is its height, its traces and its y axis."""
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    heights = sum(height for height, _, _ in rows) + _GAP * (len(rows) - 1)
    top = heights
    for number, (height, traces, axis) in enumerate(rows, 1):
        name = f"y{number if number > 1 else ''}"
        data += [{**trace, "xaxis": "x", "yaxis": name} for trace in traces]
        layout[name.replace("y", "yaxis")] = {
            **axis,
            "domain": [max(0.0, round((top - height) / heights, 4)), round(top / heights, 4)],
            "anchor": "x",
            "fixedrange": True,
        }
        top -= height + _GAP
    return data, layout | {
        "height": round(100 + _PIXELS * heights),
        "margin": {"l": 50, "r": 25, "t": 40, "b": 50},
        "hovermode": "closest",
        "dragmode": "pan",
        "xaxis": {**xaxis, "anchor": f"y{len(rows)}", "showgrid": False, "zeroline": False},
    }


def finite(value: float | None) -> float | None:
    """Return a number that JSON can represent, else None."""
    return value if value is not None and math.isfinite(value) else None
