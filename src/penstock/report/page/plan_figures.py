"""The timeline of an elastic training run's plans: frozen layers, stages, replicas, and results of epochs."""

from collections.abc import Sequence
from typing import Any

from penstock.report.page.figures import KEPT, PALETTE, ROW, TEXT_INSIDE, Figure, finite, rows_of_axes
from penstock.report.page.tables import Cell, Table
from penstock.report.training_measured import PlanLine, PlanSpan, PlanTimeline
from penstock.text import counted
from penstock.units import format_bytes, format_seconds

_COLUMNS = ("epoch", "frozen", "layers", "stages × replicas", "cached", "units/s", "accuracy", "migrate s", "moved",
            "fill s", "why")  # fmt: skip
_BAND = 0.45  # relative height of the row of stages and replicas
# colours of the palette with enough contrast with white
_COLORS = tuple(PALETTE[place] for place in (0, 1, 4, 5, 6, 2))
# with more epochs, plotly chooses which are labelled
_MAX_TICKS = 20


def plans_figure(timeline: PlanTimeline) -> Figure:
    """Draw plans and results in rows with a common epoch axis."""
    spans = [span for span in timeline.spans() if span.begin < span.end]
    rows = [(ROW, *_frozen(spans)), (_BAND, *_bands(spans))]
    rows += [(ROW, *drawn) for drawn in (_rates(timeline), _accuracies(timeline)) if drawn is not None]
    first, last = spans[0].begin, spans[-1].end
    data, layout = rows_of_axes(
        [(height, [trace], axis) for height, trace, axis in rows],
        {
            "title": {"text": "epoch"},
            "range": [first - 0.5, last - 0.5],
            **({"dtick": 1} if last - first <= _MAX_TICKS else {}),
        },
    )
    layout |= {"showlegend": False, "uniformtext": {"minsize": 9, "mode": "hide"}, "bargap": 0}
    titles = [str(axis["title"]["text"]).replace("<br>", " ") for _, _, axis in rows]
    return Figure("plans", "Timeline of plans", _alt(spans, titles), data, layout, plans_table(timeline))


def plans_table(timeline: PlanTimeline) -> Table:
    """Return each epoch with its plan; the first row of a plan has the costs and the reason of the change."""
    rows: list[tuple[Cell, ...]] = []
    epochs = {epoch.epoch: epoch for epoch in timeline.epochs}
    for span in timeline.spans():
        plan = span.plan
        kept = (plan.frozen_layers, plan.num_layers, _size(plan), "yes" if plan.cached else "no")
        cost = (finite(plan.migrate_s), format_bytes(plan.moved_bytes), finite(plan.fill_s), plan.why)
        # including a plan that was replaced immediately
        numbers = [n for n in epochs if span.begin <= n < span.end and n > span.begin]
        for number in (span.begin, *numbers):
            reached = epochs.get(number) if span.begin < span.end else None
            got = (finite(reached.units_per_s), finite(reached.accuracy)) if reached else (None, None)
            rows.append((number, *kept, *got, *(cost if number == span.begin else (None, None, None, None))))
    return Table("plans", "The plans, epoch by epoch", _COLUMNS, tuple(rows))


def plans_lines(timeline: PlanTimeline) -> list[str]:
    """Describe the first and last throughput of a run, and the costs of changes."""
    plans, epochs = timeline.plans, timeline.epochs
    lines = [f"{counted(len(epochs), 'epoch')}, {_way(plans)}."]
    if len(epochs) > 1:
        lines[0] += f" {epochs[0].units_per_s:.4g} {epochs[0].unit}/s became {epochs[-1].units_per_s:.4g}."
    migrate_s, fill_s = sum(plan.migrate_s for plan in plans), sum(plan.fill_s for plan in plans)
    if migrate_s:
        moved = format_bytes(sum(plan.moved_bytes for plan in plans))
        lines.append(f"Plan changes took {format_seconds(migrate_s)} and moved {moved}.")
    if fill_s:
        lines.append(f"Filling caches took {format_seconds(fill_s)}.")
    return lines


def _frozen(spans: Sequence[PlanSpan]) -> tuple[dict[str, Any], dict[str, Any]]:
    most = max(span.plan.num_layers for span in spans)
    steps = [*spans, spans[-1]]
    trace = {
        "type": "scatter",
        "mode": "lines",
        "line": {"shape": "hv", "color": KEPT, "width": 2},
        "fill": "tozeroy",
        "fillcolor": "rgba(0,114,178,0.18)",
        "x": [*(span.begin - 0.5 for span in spans), spans[-1].end - 0.5],
        "y": [span.plan.frozen_layers for span in steps],
        "customdata": [_told(span) for span in steps],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    axis = {
        "title": {"text": "frozen layers"},
        "range": [0, max(1, 1.08 * most)],
        "tickvals": sorted({0, most // 2, most}),
    }
    return trace, axis


def _bands(spans: Sequence[PlanSpan]) -> tuple[dict[str, Any], dict[str, Any]]:
    joined: list[PlanSpan] = []
    for span in spans:
        if joined and _looks(joined[-1].plan) == _looks(span.plan):
            joined[-1] = PlanSpan(joined[-1].plan, joined[-1].begin, span.end)
        else:
            joined.append(span)
    sizes = list(dict.fromkeys(_size(span.plan) for span in joined))
    trace = {
        "type": "bar", "orientation": "h", "width": 1, "y": [0 for _ in joined],
        "base": [span.begin - 0.5 for span in joined], "x": [span.end - span.begin for span in joined],
        "text": [_size(span.plan) + ("<br>cached" if span.plan.cached else "") for span in joined],
        **TEXT_INSIDE, "constraintext": "inside",
        "marker": {
            "color": [_COLORS[sizes.index(_size(span.plan)) % len(_COLORS)] for span in joined],
            "line": {"width": 1, "color": "#ffffff"},
            "pattern": {"shape": ["/" if span.plan.cached else "" for span in joined], "size": 6, "solidity": 0.15,
                        "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.45)"},
        },
        "customdata": [_told(span) for span in joined], "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip
    axis = {
        "title": {"text": "stages ×<br>replicas"},
        "range": [-0.5, 0.5],
        "showticklabels": False,
        "showgrid": False,
        "zeroline": False,
    }
    return trace, axis


def _rates(timeline: PlanTimeline) -> tuple[dict[str, Any], dict[str, Any]] | None:
    unit = timeline.epochs[0].unit if timeline.epochs else ""
    return _line([(e.epoch, finite(e.units_per_s)) for e in timeline.epochs], f"{unit}/s", PALETTE[4], "tozero")


def _accuracies(timeline: PlanTimeline) -> tuple[dict[str, Any], dict[str, Any]] | None:
    return _line([(e.epoch, finite(e.accuracy)) for e in timeline.epochs], "accuracy", PALETTE[1], "normal")


def _line(
    points: Sequence[tuple[int, float | None]], title: str, color: str, range_mode: str
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Draw a value for each epoch; None if no epoch has the value."""
    if all(value is None for _, value in points):
        return None
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [epoch for epoch, _ in points],
        "y": [value for _, value in points],
        "line": {"color": color},
        "name": title,
        "hovertemplate": "epoch %{x}: %{y:.4g}<extra></extra>",
    }
    return trace, {"title": {"text": title}, "rangemode": range_mode, "nticks": 5}


def _looks(plan: PlanLine) -> tuple[str, bool]:
    return _size(plan), plan.cached


def _size(plan: PlanLine) -> str:
    return f"{plan.stages} × {plan.replicas}"


def _way(plans: Sequence[PlanLine]) -> str:
    """Describe the first and the last plan."""
    first, last = _describe(plans[0]), _describe(plans[-1])
    return f"from {first} to {last}" if first != last else first


def _describe(plan: PlanLine) -> str:
    stages = f"{plan.stages} {'stage' if plan.stages == 1 else 'stages'}"
    replicas = f"{plan.replicas} {'replica' if plan.replicas == 1 else 'replicas'}"
    cached = " and cached" if plan.cached else ""
    return f"{stages} × {replicas} with {plan.frozen_layers} of {plan.num_layers} layers frozen{cached}"


def _told(span: PlanSpan) -> str:
    return f"from epoch {span.begin}: {_describe(span.plan)}" + (f"<br>{span.plan.why}" if span.plan.why else "")


def _alt(spans: Sequence[PlanSpan], titles: Sequence[str]) -> str:
    return (
        f"Epochs {spans[0].begin} to {spans[-1].end - 1} from left to right, {_way([span.plan for span in spans])}; "
        f"from the top {', '.join(titles)}. Striped plans cache the outputs of frozen layers."
    )
