"""The page of `penstock bench --report`, which compares one process and pipelines by policy and stage count."""

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.report.comparison import Compared, loads, write_files
from penstock.report.page.figures import KEPT, LOAD, LOST, MOVE, PALETTE, WAIT, Figure
from penstock.report.page.page import Text, make_page
from penstock.report.page.tables import Cell, Table
from penstock.report.stream_account import TITLES
from penstock.text import counted
from penstock.tracing.trace import Run
from penstock.units import format_bytes, format_seconds

# causes that cost less than this are not mentioned
_WORTH = 0.02


def name_of(row: Mapping[str, Any]) -> str:
    """Return the display name of a row.

    >>> name_of({"mode": "pipeline", "stages": 2, "policy": "balanced"})
    '2 stages, balanced'
    """
    if row["mode"] == "serial":
        return "one process"
    policy = "torch.distributed.pipelining" if row["mode"] == "peer" else row["policy"]
    if policy == "by hand":
        policy = f"cut by hand at {', '.join(row['cuts'])}"
    return f"{counted(row['stages'], 'stage')}, {policy}"


def compare_counts(pipelines: Sequence[Compared]) -> list[str]:
    """Describe for each stage count the losses of its fastest pipeline, and the gain of further stages."""
    counts = ([item for item in pipelines if item.row["stages"] == count] for count in _counts(pipelines))
    best = [max(items, key=lambda item: item.row["speedup"]) for items in counts]
    lines = []
    for item in best:
        account = item.account
        lost = sorted(
            (line for line in account.lines if line.times >= _WORTH * account.num_times), key=lambda line: -line.times
        )
        causes = "; ".join(f"{line.times:.2f} to {line.title} ({line.why})" for line in lost)
        lines.append(
            f"{item.name}: {item.row['speedup']:.2f} times one process. By the account "
            f"{account.speedup:.2f} of {account.num_times:.2f} are reached"
            + (f" and {account.num_times - account.speedup:.2f} are lost: {causes}." if lost else ".")
        )
    for before, after in pairwise(best):
        gained = after.row["speedup"] - before.row["speedup"]
        more = after.row["stages"] - before.row["stages"]
        grown = max(after.account.lines, key=lambda line: line.times - before.account.times(line.key))
        grew = grown.times - before.account.times(grown.key)
        lines.append(
            f"From {before.row['stages']} to {after.row['stages']} stages the speed-up changes by {gained:+.2f} for "
            f"{counted(more, 'more device')}"
            + (f"; what grows most is {grown.title}, by {grew:.2f}." if grew >= _WORTH else ".")
        )
    if best:
        top = max(best, key=lambda item: item.row["speedup"])
        lines.append(
            f"Of these counts {top.row['stages']} is the quickest; per device, "
            + ", ".join(f"{item.row['stages']} give {item.row['speedup'] / item.row['stages']:.2f}" for item in best)
            + "."
        )
    return lines


def compare_policies(pipelines: Sequence[Compared]) -> list[str]:
    """Describe the split points of each policy, and for each stage count the advantage of its best policy."""
    lines = []
    for count in _counts(pipelines):
        found = sorted((p for p in pipelines if p.row["stages"] == count), key=lambda p: -p.row["speedup"])
        for item in found:
            lines.append(f"{item.name}, {_where(item)}")
        if len(found) > 1 and found[0].row["cuts"]:
            lines += [_why(_like(other, found) or found[0], other) for other in found[1:]]
    return lines


def _where(item: Compared) -> str:
    """Describe a pipeline's split points."""
    cuts, shares = item.row["cuts"], item.row.get("shares", [])
    if not cuts:
        return "is not split."
    crossing = zip(cuts, item.row["crossing_bytes"], strict=True)
    text = f"splits at {', '.join(f'{cut} ({format_bytes(size)})' for cut, size in crossing)}"
    if shares:
        text += f"; the stages have {', '.join(f'{share:.1%}' for share in shares)} of the counted work"
    return f"{text}; {_crossing(item)} cross per microbatch; {item.row['speedup']:.2f} times one process."


def _why(best: Compared, other: Compared) -> str:
    """Explain why one pipeline is faster than another: the other's largest additional loss, and its figures."""
    slower = 1 - other.row["speedup"] / best.row["speedup"]
    better, worse = best.row["policy"], other.row["policy"]
    if best.row["cuts"] == other.row["cuts"]:
        return f"{worse} has the same cuts as {better}: the {slower:.1%} between them is how unsteady the machine is."
    longer = _alone_s(other) / _alone_s(best) - 1
    line = max(other.account.lines, key=lambda line: line.times - best.account.times(line.key))
    more = line.times - best.account.times(line.key)
    text = f"{worse} is {slower:.1%} slower than {better}"
    if more < _WORTH:
        return f"{text}, with no cause that costs it {_WORTH:g} times more{_unsteady(longer)}."
    text += f": it loses {more:.2f} times more to {TITLES[line.key]}"
    if line.key == "imbalance":
        text += f", its slowest stage takes {_slowest(other)} alone, that of {better} {_slowest(best)}"
    elif line.key in {"communication", "communication_cpu"}:
        text += f", {_crossing(other)} cross per microbatch instead of {_crossing(best)}"
    else:
        text += f" ({line.why})"
    return f"{text}{_unsteady(longer)}."


def _like(other: Compared, found: Sequence[Compared]) -> Compared | None:
    """Return a faster pipeline with the same cuts, or None."""
    quicker = found[: found.index(other)]
    return next((item for item in quicker if item.row["cuts"] == other.row["cuts"]), None)


def _alone_s(item: Compared) -> float:
    return sum(stage.alone_s for stage in item.stream.stages)


def _unsteady(longer: float) -> str:
    """Describe that stages took longer alone: all rows run the same operations, so the policy is not the cause."""
    if longer < _WORTH:
        return ""
    return f"; all its stages alone took {longer:.1%} longer for the same operations, which is the machine's doing"


def _slowest(item: Compared) -> str:
    return format_seconds(max(stage.alone_s for stage in item.stream.stages))


def _crossing(item: Compared) -> str:
    return format_bytes(sum(item.row["crossing_bytes"]))


def _counts(pipelines: Sequence[Compared]) -> list[int]:
    return sorted({item.row["stages"] for item in pipelines})


_COLORS = {
    "imbalance": LOST,
    "bubble": WAIT,
    "slower": "#cc79a7",
    "communication_cpu": MOVE,
    "overhead": "#56b4e9",
    "loading": LOAD,
    "communication": "#009e73",
    "remainder": "#7f7f7f",
}


def write_bench_page(
    path: str | os.PathLike[str], settings: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], Run | None]]
) -> Path:
    """Write the page that compares a bench's rows; rows of pipelines come with a recorded run.

    Example:
        write_bench_page("bench.html", {"model": "timm:deit_tiny_patch16_224"}, rows)

    Raises `UsageError` if the file cannot be written or plotly is not installed.
    """
    serial = next(row for row, _ in rows if row["mode"] == "serial")
    traced = [Compared(name_of(row), run, row) for row, run in rows if run is not None]
    figures = [speedups([row for row, _ in rows])]
    figures += [losses(traced), loads(traced)] if traced else []
    texts = [
        Text("counts", "Stage counts: what the speed-up loses", compare_counts(traced)),
        Text("policies", "Policies: where they split, and why one is better", compare_policies(traced)),
    ]
    page = make_page(
        f"{settings['model']}: serial and pipelines",
        _lead(serial, [row for row, _ in rows]),
        figures,
        [settings_table(settings)],
        [text for text in texts if text.lines],
    )
    file = Path(path)
    write_files({file: page}, "--report")
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
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [counted(c, "stage") for c in counts if c in own],
                "y": [round(own[c]["speedup"], 4) for c in counts if c in own],
                "text": [f"{own[c]['speedup']:.2f}" for c in counts if c in own],
                "textposition": "outside",
                "cliponaxis": False,
                "marker": {"color": PALETTE[place % len(PALETTE)]},
                "hovertemplate": "%{x}, " + name + ": %{y:.3f} times<extra></extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "n",
            "x": [counted(c, "stage") for c in counts],
            "y": counts,
            "marker": {"symbol": "line-ew-open", "size": 34, "color": "#888888", "line": {"width": 2}},
            "hovertemplate": "n is %{y}<extra></extra>",
        }
    )
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (row["mode"], row["stages"], row["policy"], row["runtime"], row["images_per_second"], row["speedup"],
         row.get("efficiency"), None if row["bit_equal"] is None else "yes" if row["bit_equal"] else "no")
        for row in rows
    )  # fmt: skip
    columns = (
        "mode",
        "number of stages",
        "policy",
        "runtime",
        "images/s",
        "speed-up, times one process",
        "efficiency, of all devices alone",
        "outputs bit-equal",
    )
    alt = "Speed-up over one process: " + ", ".join(f"{name_of(row)} {row['speedup']:.2f}" for row in pipelines) + "."
    layout = {
        "barmode": "group",
        "height": 400,
        "xaxis": {"automargin": True, "type": "category"},
        "yaxis": {"title": {"text": "times one process"}, "rangemode": "tozero"},
    }
    return Figure(
        "speedups",
        "Speed-up by stages and policy",
        alt,
        data,
        layout,
        Table("rows", "What was measured", columns, cells),
    )


def _series(row: Mapping[str, Any]) -> str:
    return "torch.distributed.pipelining" if row["mode"] == "peer" else str(row["policy"])


def losses(traced: Sequence[Compared]) -> Figure:
    """Draw for each pipeline how n times is divided into the speed-up and the cost of each cause."""
    names = [item.name for item in traced]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": "reached",
            "x": names,
            "y": [round(item.account.speedup, 4) for item in traced],
            "marker": {"color": KEPT},
            "hovertemplate": "%{x}: %{y:.2f} reached<extra></extra>",
        }
    ]
    for key, color in _COLORS.items():
        values = [item.account.times(key) for item in traced]
        if max(map(abs, values)) >= 5e-3:
            data.append(
                {
                    "type": "bar",
                    "name": TITLES[key],
                    "x": names,
                    "y": [round(v, 4) for v in values],
                    "marker": {"color": color},
                    "hovertemplate": "%{x}: %{y:.2f} " + TITLES[key] + "<extra></extra>",
                }
            )
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (item.name, item.account.num_times, *(-item.account.times(key) for key in _COLORS), item.account.speedup)
        for item in traced
    )
    columns = ("pipeline", "devices together", *(TITLES[key] for key in _COLORS), "reached")
    alt = (
        "Of n times: "
        + " ".join(
            f"{item.name} reaches {item.account.speedup:.2f} of {item.account.num_times:.2f}, most is lost to "
            f"{item.account.largest.title}."
            for item in traced
        )
        + " Against the devices running the stages alone, as the account of a run has it."
    )
    layout = {
        "barmode": "relative",
        "height": 460,
        "yaxis": {"title": {"text": "times one device"}},
        "xaxis": {"automargin": True, "tickangle": 30, "type": "category"},
    }
    return Figure(
        "losses",
        "Why not n times",
        alt,
        data,
        layout,
        Table("losses", "What each cause costs, in times one device", columns, cells),
    )


def settings_table(settings: Mapping[str, Any]) -> Table:
    """Return the settings common to all rows."""
    cells = tuple(
        (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
        for name, value in settings.items()
    )
    return Table("environment", "The environment", ("what", "value"), cells)
