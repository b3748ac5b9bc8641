"""Figures and tables of training runs: curves over the steps, all actions of all steps, and each device's seconds."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from penstock.report.page.figures import (
    COMPUTING,
    KEPT,
    LOAD,
    LOST,
    MAX_DRAWN,
    MOVE,
    PALETTE,
    ROW,
    SYNCHRONIZE,
    TEXT_INSIDE,
    UPDATE,
    WAIT,
    Figure,
    finite,
    rates,
    rows_of_axes,
    stacked,
    timeline_layout,
    waterfall,
)
from penstock.report.page.figures import memory as memory_figure
from penstock.report.page.tables import Cell, Table, account_table, clock_table, environment_table, memory_of
from penstock.report.stream_account import Account
from penstock.report.training_account import Usual, usual_seconds
from penstock.report.training_measured import DevicePart, EpochLine, MeasuredTraining, RunMetrics, StepLine, TimedAction
from penstock.text import counted
from penstock.tracing.trace import Run
from penstock.units import format_bytes, format_seconds

# pattern of bars in the microbatch's colour: forwards plain, backwards striped
_PATTERNS = {"F": "", "R": ".", "B": "/", "I": "/", "W": "x"}
_OTHER_KINDS = {
    "I": "I the half of a backward for the inputs",
    "W": "W the half for the weights",
    "R": "R a recomputed forward",
}


def training_figures(run: Run, training: MeasuredTraining, account: Account) -> list[Figure | None]:
    """Draw the figures of a training run."""
    return [
        waterfall(account, account_table(account)),
        timeline(run, training),
        loads(run, training),
        throughput(training),
        memory_figure(run),
    ]


def training_tables(run: Run, training: MeasuredTraining) -> list[Table]:
    """Return the tables without a figure."""
    return [link_table(training), clock_table(run), environment_table(run)]


def _row(run: Run, training: MeasuredTraining, rank: int, stage: int) -> str:
    replicas = training.replicas
    of = next(index for index, replica in enumerate(replicas) if rank in replica)
    prefix = f"replica {of}, " if len(replicas) > 1 else ""
    return f"{prefix}stage {stage}<br>{run.facts.devices[rank]}"


def timeline(run: Run, training: MeasuredTraining) -> Figure:
    """Draw the activities of every stage over time: forwards and backwards, messages, waiting, all-reduces."""
    first = training.steps[0]
    each = max(1, len({done.microbatch for part in first.parts.values() for done in part.done}))
    steps = training.steps[: max(1, MAX_DRAWN // (2 * each))]
    origin_s = min(part.begin_s for part in first.parts.values())
    told = {(s.number, m): _journey(run, training, s.number, m, origin_s) for s in steps for m in range(each)}
    bars: dict[str, list[tuple[str, float, float, str, str, str, str]]] = {}

    def add(name: str, row: str, begin_s: float, seconds: float, journey: str, text: str = "", color: str = "",
            pattern: str = "") -> None:  # fmt: skip
        if seconds > 0:
            bars.setdefault(name, []).append((row, begin_s - origin_s, seconds, journey, text, color, pattern))

    for step in steps:
        for rank, part in step.parts.items():
            for done in part.done:
                row, journey = _row(run, training, rank, done.stage), told.get((step.number, done.microbatch), "")
                add("waiting", row, done.asked_s, done.arrived_s - done.asked_s, journey)
                add("messages", row, done.arrived_s, done.read_s, journey)
                add("messages", row, done.gave_s - done.give_s, done.give_s, journey)
                add(COMPUTING, row, done.begin_s, done.compute_s, journey, done.label,
                    PALETTE[done.microbatch % len(PALETTE)], _PATTERNS[done.kind])  # fmt: skip
            own = (
                f"step {step.number} on {run.facts.devices[rank]}: loading {format_seconds(part.load_s)}, "
                f"synchronization {format_seconds(part.synchronize_s)}, "
                f"the optimizer {format_seconds(part.update_s)}"
            )
            row = _row(run, training, rank, min(done.stage for done in part.done)) if part.done else ""
            if row:
                add("synchronization", row, part.end_s - part.synchronize_s, part.synchronize_s, own)
                add("update", row, part.begin_s, part.update_s, own)
    looks = {
        "waiting": (0.35, WAIT),
        "messages": (0.35, MOVE),
        "synchronization": (0.35, SYNCHRONIZE),
        "update": (0.35, UPDATE),
        COMPUTING: (0.8, KEPT),
    }
    data = [
        {"type": "bar", "orientation": "h", "name": name, "width": width, "y": [b[0] for b in found],
         "base": [round(b[1], 6) for b in found], "x": [round(b[2], 6) for b in found],
         "customdata": [b[3] for b in found], "hovertemplate": "%{customdata}<extra>" + name + "</extra>",
         "marker": {"color": color} if name != COMPUTING else {
             "color": [b[5] for b in found], "line": {"width": 0.5, "color": "#ffffff"},
             "pattern": {"shape": [b[6] for b in found], "size": 5, "solidity": 0.2, "fillmode": "overlay",
                         "fgcolor": "rgba(255,255,255,0.45)"}},
         **({"text": [b[4] for b in found], **TEXT_INSIDE} if name == COMPUTING else {})}
        for name, (width, color) in looks.items() if (found := bars.get(name))
    ]  # fmt: skip
    num_rows = len({bar[0] for found in bars.values() for bar in found})
    end_s = max(part.end_s for part in first.parts.values())
    layout = timeline_layout("seconds", [0.0, round(1.02 * (end_s - origin_s), 5)], num_rows=num_rows)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (number, m, text.replace("<br>", "; ")) for (number, m), text in told.items()
    )
    table = Table("timeline", "Every microbatch's journey", ("step", "microbatch", "journey"), rows)
    kinds = {done.kind for part in first.parts.values() for done in part.done}
    others = "".join(f", {text}" for kind, text in _OTHER_KINDS.items() if kind in kinds)
    alt = (
        f"One row for each stage of {run.facts.model}, time from left to right; F and a number is the forward of that "
        f"microbatch, B its backward{others}. {len(steps)} of {len(training.steps)} steps."
    )
    return Figure("timeline", "Timeline", alt, data, layout, table, tuple(told.values()))


def _journey(run: Run, training: MeasuredTraining, number: int, microbatch: int, origin_s: float) -> str:
    """Describe the path of a microbatch in a step, in order."""
    (step,) = (step for step in training.steps if step.number == number)
    found: list[tuple[TimedAction, int]] = [
        (done, rank) for rank, part in step.parts.items() for done in part.done if done.microbatch == microbatch
    ]
    lines = [f"step {number}, microbatch {microbatch}"]
    for done, rank in sorted(found, key=lambda item: item[0].begin_s):
        name = _row(run, training, rank, done.stage).replace("<br>", " on ")
        waited = f", waited {format_seconds(done.wait_s)}" if done.wait_s > 1e-4 else ""
        lines.append(
            f"{name}: {done.kind} {format_seconds(done.compute_s)} from {done.begin_s - origin_s:.4f} s{waited}"
        )
    return "<br>".join(lines)


# activities of a device in a step, with their colours
_SHARES = (
    ("forwards", KEPT),
    ("backwards", "#56b4e9"),
    ("messages", MOVE),
    ("waiting", WAIT),
    ("loading", LOAD),
    ("synchronization", SYNCHRONIZE),
    ("optimizer", UPDATE),
    ("the rest", LOST),
)


def _shares(part: DevicePart) -> tuple[float, ...]:
    return (
        sum(d.compute_s for d in part.done if d.kind == "F"),
        sum(d.compute_s for d in part.done if d.kind != "F"),
        sum(d.message_s for d in part.done),
        sum(d.wait_s for d in part.done),
        part.load_s,
        part.synchronize_s,
        part.update_s,
        part.rest_s + part.between_s,
    )


def device_shares(training: MeasuredTraining, rank: int) -> list[float]:
    """Return a device's mean seconds per step for each activity."""
    found = [_shares(step.parts[rank]) for step in training.steps]
    return [statistics.fmean(values) for values in zip(*found, strict=True)]


def loads(run: Run, training: MeasuredTraining) -> Figure:
    """Draw the seconds per step of each device by activity."""
    ranks = [rank for replica in training.replicas for rank in dict.fromkeys(replica)]
    names = [_device(run, training, rank) for rank in ranks]
    shares = {rank: device_shares(training, rank) for rank in ranks}
    parts = [(name, [1e3 * shares[rank][at] for rank in ranks], color) for at, (name, color) in enumerate(_SHARES)]
    usual = usual_seconds(training, run.facts.threads)
    rows = tuple(_stage_rows(run, training, usual))
    columns = ("device", "stage", "from, to", "forward", "alone", "backward", "alone", "busy", "peak memory")
    alt = "Seconds per step of each device: " + ", ".join(
        f"{run.facts.devices[rank]} computes {format_seconds(sum(shares[rank][:2]))}" for rank in ranks
    )
    table = Table("stages", "The stages, per microbatch", columns, rows)
    return Figure(
        "loads",
        "What each device does with a step",
        alt + ".",
        stacked(names, parts),
        {"barmode": "stack", "height": 380, "yaxis": {"title": {"text": "ms per step"}}, "xaxis": {"automargin": True}},
        table,
    )


def _device(run: Run, training: MeasuredTraining, rank: int) -> str:
    held = ", ".join(
        str(stage) for replica in training.replicas for stage, holder in enumerate(replica) if holder == rank
    )
    return f"{run.facts.devices[rank]}<br>stage {held}"


def _stage_rows(run: Run, training: MeasuredTraining, usual: Usual) -> list[tuple[Cell, ...]]:
    bounds = ["input", *run.facts.cuts, "output"]
    rows: list[tuple[Cell, ...]] = []
    for replica in training.replicas:
        for stage, rank in enumerate(replica):
            done = training.of_stage(rank, stage)
            cells: list[Cell] = []
            for kinds in ("F", "RBIW"):
                own = [d for d in done if d.kind in kinds]
                num = sum(d.kind in "FBI" for d in own) or 1
                cells.append(format_seconds(sum(d.compute_s for d in own) / num))
                cells.append(format_seconds(sum(usual.of(rank, d) for d in own) / num))
            busy_s = sum(d.compute_s + d.message_s for d in done)
            rows.append((run.facts.devices[rank], stage, f"{bounds[stage]} to {bounds[stage + 1]}", *cells,
                         f"{busy_s / training.seconds:.1%}", memory_of(run, rank)))  # fmt: skip
    return rows


def throughput(training: MeasuredTraining) -> Figure:
    """Draw rows per second, step by step."""
    points = [(step.number, step.num_rows / step.seconds) for step in training.steps]
    data, layout = rates(points, "lines+markers", "step %{x}: %{y:.4g} rows/s<extra></extra>", "step", "rows/s")
    rows: tuple[tuple[Cell, ...], ...] = tuple((n, round(rate, 2)) for n, rate in points)
    alt = f"{training.num_rows / training.seconds:.4g} rows per second over {len(points)} steps."
    table = Table("throughput", "Throughput, step by step", ("step", "rows/s"), rows)
    return Figure("throughput", "Throughput over time", alt, data, layout, table)


def link_table(training: MeasuredTraining) -> Table:
    """Return each stage's messages in a step with their seconds in flight, as observed when a receiver waited."""
    rows: list[tuple[Cell, ...]] = []
    for (source, to, direction), seconds in sorted(training.lines_s.items()):
        what = "activations" if direction == "F" else "gradients"
        rows.append((f"from stage {source} to stage {to}", what, format_seconds(seconds)))
    for process in training.processes.values():
        all_reduces = [s for s in process.spans if s.kind == "synchronize" and s.name == "sum"]
        if all_reduces:
            per_step = sum(s.num_bytes for s in all_reduces) / len({s.step for s in all_reduces})
            rows.append(
                (
                    process.device,
                    f"all-reduces of gradients, {format_bytes(per_step)} per step",
                    format_seconds(statistics.median(s.seconds for s in all_reduces)),
                )
            )
    return Table("links", "The links", ("link", "what", "under way"), tuple(rows))


# a browser draws about this many points quickly; more steps are drawn as means of as many groups
_MAX_POINTS = 1000
_COLUMNS = ("epoch", "step", "training loss", "validation loss", "accuracy", "throughput")
Runs = Sequence[tuple[str, RunMetrics]]  # by name
_Point = tuple[int, float | None]


def learning_figure(runs: Runs) -> Figure:
    """Draw the curves of runs in rows with a common axis of steps, a colour for each run."""
    curves: list[tuple[str, list[list[_Point]]]] = [
        ("training loss", [_steps(run, lambda step: step.loss) for _, run in runs]),
        ("validation loss", [_epochs(run, lambda epoch: epoch.validation_loss) for _, run in runs]),
        ("accuracy", [_epochs(run, lambda epoch: epoch.accuracy) for _, run in runs]),
        (f"{_unit(runs)}/s", [_epochs(run, lambda epoch: epoch.units_per_s) for _, run in runs]),
        ("learning rate", [_steps(run, lambda step: step.learning_rate) for _, run in runs]),
    ]
    rows: list[tuple[float, list[dict[str, Any]], dict[str, Any]]] = []
    named: set[int] = set()
    for title, points in curves:
        traces = [
            {**_trace(points[number], name, title, PALETTE[number % len(PALETTE)]), "showlegend": number not in named}
            for number, (name, _) in enumerate(runs)
            if points[number]
        ]
        if traces:
            named |= {number for number, each in enumerate(points) if each}
            floor = "tozero" if title.endswith("/s") else "normal"
            rows.append((ROW, traces, {"title": {"text": title}, "rangemode": floor, "nticks": 5}))
    data, layout = rows_of_axes(rows, {"title": {"text": "step"}})
    titles = [axis["title"]["text"] for _, _, axis in rows]
    who = "" if len(runs) == 1 else f" A colour for each run: {', '.join(name for name, _ in runs)}."
    return Figure(
        "learning",
        "Curves",
        f"Steps from left to right; from the top {', '.join(titles)}.{who}",
        data,
        layout | {"showlegend": len(runs) > 1},
        epochs_table(runs),
    )


def learning_lines(run: RunMetrics) -> list[str]:
    """Describe a run in one sentence: epochs, steps, losses, accuracy and throughput."""
    steps, epochs = run.steps, run.epochs
    parts = [
        counted(len(epochs), "epoch"),
        counted(max([*(s.step for s in steps), *(e.step for e in epochs)], default=0), "step"),
    ]
    if losses := [epoch.train_loss for epoch in epochs if epoch.train_loss is not None]:
        parts.append(
            f"training loss {losses[0]:.4g} to {losses[-1]:.4g}"
            if len(losses) > 1
            else f"training loss {losses[0]:.4g}"
        )
    if epochs and epochs[-1].validation_loss is not None:
        parts.append(f"validation loss {epochs[-1].validation_loss:.4g}")
    if reached := [(epoch.accuracy, -epoch.epoch) for epoch in epochs if finite(epoch.accuracy) is not None]:
        best, at = max(reached)
        parts.append(f"accuracy {epochs[-1].accuracy:.2%} (best {best:.2%}, epoch {-at})")
    if epochs:
        parts.append(f"{epochs[-1].units_per_s:.4g} {epochs[-1].unit}/s")
    return [f"{', '.join(parts)}."]


def epochs_table(runs: Runs) -> Table:
    """Return the epochs of runs; with several runs the first column has the name."""
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs:
        for epoch in run.epochs:
            cells = (
                epoch.epoch,
                epoch.step,
                finite(epoch.train_loss),
                finite(epoch.validation_loss),
                finite(epoch.accuracy),
                f"{epoch.units_per_s:.4g} {epoch.unit}/s",
            )
            rows.append((name, *cells) if len(runs) > 1 else cells)
    columns = ("run", *_COLUMNS) if len(runs) > 1 else _COLUMNS
    return Table("epochs", "The epochs", columns, tuple(rows))


def _steps(run: RunMetrics, value: Callable[[StepLine], float | None]) -> list[_Point]:
    points = [(step.step, number) for step in run.steps if (number := finite(value(step))) is not None]
    size = -(-len(points) // _MAX_POINTS) or 1
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(number for _, number in group) / len(group)) for group in groups]


def _epochs(run: RunMetrics, value: Callable[[EpochLine], float | None]) -> list[_Point]:
    return [(epoch.step, number) for epoch in run.epochs if (number := finite(value(epoch))) is not None]


def _trace(points: Sequence[_Point], name: str, title: str, color: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) <= 60 else "lines",
        "name": name,
        "legendgroup": name,
        "x": [step for step, _ in points],
        "y": [number for _, number in points],
        "line": {"color": color},
        "hovertemplate": f"step %{{x}}: {title} %{{y:.4g}}",
    }


def _unit(runs: Runs) -> str:
    return next((run.epochs[0].unit for _, run in runs if run.epochs), "rows")
