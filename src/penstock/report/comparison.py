"""The page of `penstock bench --report`, which compares one process and pipelines by policy and stage count."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.report.comparison_text import Compared, compare_counts, compare_policies, name_of
from penstock.report.page.figures import KEPT, LOAD, LOST, MOVE, PALETTE, WAIT, Figure
from penstock.report.page.page import Text, make_page
from penstock.report.page.tables import Cell, Table
from penstock.report.stream.account import TITLES, make_account
from penstock.report.stream.measured import measure_stream
from penstock.text import counted
from penstock.tracing.trace import Run
from penstock.units import format_bytes, format_seconds

_COLORS = {
    "imbalance": LOST, "bubble": WAIT, "slower": "#cc79a7", "communication_cpu": MOVE, "overhead": "#56b4e9",
    "loading": LOAD, "communication": "#009e73", "remainder": "#7f7f7f",
}  # fmt: skip


def write_comparison(
    path: str | os.PathLike[str], settings: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], Run | None]]
) -> Path:
    """Write the page that compares a bench's rows; rows of pipelines come with a recorded run.

    Example:
        write_comparison("bench.html", {"model": "timm:deit_tiny_patch16_224"}, rows)

    Raises `UsageError` if the file cannot be written or plotly is not installed.
    """
    serial = next(row for row, _ in rows if row["mode"] == "serial")
    traced: list[Compared] = []
    for row, run in rows:
        if run is not None:
            stream = measure_stream(run)
            traced.append(Compared(row, stream, make_account(run, stream)))
    figures = [speedups([row for row, _ in rows])]
    figures += [losses(traced), loads(traced)] if traced else []
    texts = [
        Text("counts", "Stage counts: what the speed-up loses", compare_counts(traced)),
        Text("policies", "Policies: where they split, and why one is better", compare_policies(traced)),
    ]
    page = make_page(
        f"{settings['model']}: serial and pipelines", _lead(serial, [row for row, _ in rows]), figures,
        [split_points(traced), settings_table(settings)], [text for text in texts if text.lines],
    )  # fmt: skip
    file = Path(path)
    try:
        write_whole(file, page)
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror}); choose another --report") from None
    return file


def _lead(serial: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the throughput of one process and of the best pipeline, and whether their outputs are equal."""
    lines = [f"One process: {serial['images_per_second']:.4g} images/s."]
    pipelines = [row for row in rows if row["mode"] == "pipeline"]
    if pipelines:
        best = max(pipelines, key=lambda row: row["speedup"])
        lines[0] += (
            f" The quickest pipeline, {name_of(best)}: {best['images_per_second']:.4g} images/s, "
            f"{best['speedup']:.2f} times."
        )
        differing = [name_of(row) for row in pipelines if not row["bit_equal"]]
        if differing:
            lines.append(f"Outputs differ from one process's with {', '.join(differing)}.")
        else:
            lines.append(f"The outputs of all {len(pipelines)} pipelines are bit for bit those of one process.")
    return lines


def speedups(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the speed-up over one process by stage count: a bar for each policy, and the ideal n as a line."""
    pipelines = [row for row in rows if row["mode"] != "serial"]
    counts = sorted({row["stages"] for row in pipelines})
    names = list(dict.fromkeys(_series(row) for row in pipelines))
    data: list[dict[str, Any]] = []
    for place, name in enumerate(names):
        own = {row["stages"]: row for row in pipelines if _series(row) == name}
        data.append({
            "type": "bar", "name": name, "x": [counted(c, "stage") for c in counts if c in own],
            "y": [round(own[c]["speedup"], 4) for c in counts if c in own],
            "text": [f"{own[c]['speedup']:.2f}" for c in counts if c in own], "textposition": "outside",
            "cliponaxis": False, "marker": {"color": PALETTE[place % len(PALETTE)]},
            "hovertemplate": "%{x}, " + name + ": %{y:.3f} times<extra></extra>",
        })  # fmt: skip
    data.append({
        "type": "scatter", "mode": "markers", "name": "n", "x": [counted(c, "stage") for c in counts],
        "y": counts, "marker": {"symbol": "line-ew-open", "size": 34, "color": "#888888", "line": {"width": 2}},
        "hovertemplate": "n is %{y}<extra></extra>",
    })  # fmt: skip
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (row["mode"], row["stages"], row["policy"], row["runtime"], row["images_per_second"], row["speedup"],
         row.get("efficiency"), None if row["bit_equal"] is None else "yes" if row["bit_equal"] else "no")
        for row in rows
    )  # fmt: skip
    columns = (
        "mode", "number of stages", "policy", "runtime", "images/s", "speed-up, times one process",
        "efficiency, of all devices alone", "outputs bit-equal",
    )  # fmt: skip
    alt = "Speed-up over one process: " + ", ".join(f"{name_of(row)} {row['speedup']:.2f}" for row in pipelines) + "."
    layout = {
        "barmode": "group", "height": 400, "xaxis": {"automargin": True, "type": "category"},
        "yaxis": {"title": {"text": "times one process"}, "rangemode": "tozero"},
    }  # fmt: skip
    return Figure("speedups", "Speed-up by stages and policy", alt, data, layout,
                  Table("rows", "What was measured", columns, cells))  # fmt: skip


def _series(row: Mapping[str, Any]) -> str:
    return "torch.distributed.pipelining" if row["mode"] == "peer" else str(row["policy"])


def losses(traced: Sequence[Compared]) -> Figure:
    """Draw for each pipeline how n times is divided into the speed-up and the cost of each cause."""
    names = [item.name for item in traced]
    data: list[dict[str, Any]] = [{
        "type": "bar", "name": "reached", "x": names, "y": [round(item.account.speedup, 4) for item in traced],
        "marker": {"color": KEPT}, "hovertemplate": "%{x}: %{y:.2f} reached<extra></extra>",
    }]  # fmt: skip
    for key, color in _COLORS.items():
        values = [item.account.times(key) for item in traced]
        if max(map(abs, values)) >= 5e-3:
            data.append({
                "type": "bar", "name": TITLES[key], "x": names, "y": [round(v, 4) for v in values],
                "marker": {"color": color}, "hovertemplate": "%{x}: %{y:.2f} " + TITLES[key] + "<extra></extra>",
            })  # fmt: skip
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (item.name, item.account.num_times, *(-item.account.times(key) for key in _COLORS), item.account.speedup)
        for item in traced
    )
    columns = ("pipeline", "devices together", *(TITLES[key] for key in _COLORS), "reached")
    alt = "Of n times: " + " ".join(
        f"{item.name} reaches {item.account.speedup:.2f} of {item.account.num_times:.2f}, most is lost to "
        f"{item.account.largest.title}." for item in traced
    ) + " Against the devices running the stages alone, as the account of a run has it."  # fmt: skip
    layout = {"barmode": "relative", "height": 460, "yaxis": {"title": {"text": "times one device"}},
              "xaxis": {"automargin": True, "tickangle": 30, "type": "category"}}  # fmt: skip
    return Figure("losses", "Why not n times", alt, data, layout,
                  Table("losses", "What each cause costs, in times one device", columns, cells))  # fmt: skip


def loads(traced: Sequence[Compared]) -> Figure:
    """Draw the seconds of each stage alone, for each pipeline: equal bars are a good split."""
    most = max(len(item.stream.stages) for item in traced)
    data: list[dict[str, Any]] = []
    for index in range(most):
        held = [item for item in traced if index < len(item.stream.stages)]
        data.append({
            "type": "bar", "name": f"stage {index}", "x": [item.name for item in held],
            "y": [round(1e3 * item.stream.stages[index].alone_s, 4) for item in held],
            "marker": {"color": PALETTE[index % len(PALETTE)]},
            "hovertemplate": "%{x}, stage " + str(index) + ": %{y:.3g} ms<extra></extra>",
        })  # fmt: skip
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (item.name, s.index, format_seconds(s.alone_s), format_seconds(s.mean("compute_s")),
         format_seconds(s.mean("wait_s")), format_seconds(s.mean("message_s")))
        for item in traced for s in item.stream.stages
    )  # fmt: skip
    columns = ("pipeline", "stage", "computing alone", "computing", "waiting", "messages")
    alt = "What the stages take alone per microbatch: " + " ".join(
        f"{item.name}: {', '.join(format_seconds(s.alone_s) for s in item.stream.stages)}." for item in traced
    )
    layout = {"barmode": "group", "height": 400, "yaxis": {"title": {"text": "ms per microbatch, alone"}},
              "xaxis": {"automargin": True, "tickangle": 30, "type": "category"}}  # fmt: skip
    return Figure("loads", "How even the splits are", alt, data, layout,
                  Table("loads", "The stages, per microbatch", columns, cells))  # fmt: skip


def split_points(traced: Sequence[Compared]) -> Table:
    """Return each pipeline's cuts, each stage's share of the counted work, and the bytes that cross after it."""
    rows: list[tuple[Cell, ...]] = []
    for item in traced:
        shares, crossing, cuts = (item.row.get(key, []) for key in ("shares", "crossing_bytes", "cuts"))
        for stage, share in enumerate(shares):
            follows = stage < len(cuts)
            rows.append((item.name, stage, cuts[stage] if follows else None, f"{share:.1%}",
                         format_bytes(crossing[stage]) if follows else None))  # fmt: skip
    columns = ("pipeline", "stage", "cut after it", "share of the counted work", "crosses the cut, per microbatch")
    return Table("splits", "The split points", columns, tuple(rows))


def settings_table(settings: Mapping[str, Any]) -> Table:
    """Return the settings common to all rows."""
    cells = tuple(
        (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
        for name, value in settings.items()
    )
    return Table("environment", "The environment", ("what", "value"), cells)
