"""Tables of a run: account, stages, links, memory; formatted for pages, Markdown and CSV."""

import csv
import html
import io
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.report.stream_account import Account, edge_name, loads_alone
from penstock.report.stream_measured import MeasuredStream
from penstock.text import plain, plain_cell
from penstock.tracing.trace import GenerationFacts, Run
from penstock.units import format_bytes, format_rate, format_seconds

_MARKUP = re.compile(r"[\\|`\[\]]")
INPUT, OUTPUT = "input", "output"
Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its title, column names and rows."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [f"| {' | '.join(self.columns)} |", f"|{' --- |' * len(self.columns)}"]
        lines += [f"| {' | '.join(_markdown(show(cell)) for cell in row)} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return the table as CSV, with numbers in full precision."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([[plain_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows])
        return text.getvalue()


def show(cell: Cell) -> str:
    """Format a cell for display."""
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _markdown(text: str) -> str:
    """Escape a cell, so that no name is interpreted as markup or HTML, or ends the cell."""
    escaped = _MARKUP.sub(r"\\\g<0>", plain(text))
    return html.escape(escaped, quote=False)


def account_table(account: Account) -> Table:
    """Return the account, from n down to the measured speed-up."""
    rows: list[tuple[Cell, ...]] = [("devices together", account.num_times, "what the devices do alone, added up")]
    rows += [(line.title, -line.times, line.why) for line in account.lines]
    rows.append(("measured", account.speedup, "times the mean device alone"))
    return Table("account", "The account: from n to the measured speed-up", ("cause", "times", "why"), tuple(rows))


def stage_table(run: Run, stream: MeasuredStream, predicted: dict[str, float]) -> Table:
    """Return the table of stages: cuts, seconds, alone and predicted, and the busy time of the device."""
    rows: list[tuple[Cell, ...]] = []
    for stage in stream.stages:
        compute_s = stage.mean("compute_s")
        busy_s = (compute_s + stage.mean("message_s")) * stage.share * stream.num_microbatches
        known = predicted.get(_host(run, stage.rank))
        bounds = bounds_of(run, stage.index)
        place = "in rotation" if bounds is None else f"{bounds[0]} to {bounds[1]}"
        rows.append(
            (
                stage.index,
                stage.device,
                place,
                format_seconds(compute_s),
                format_seconds(stage.alone_s),
                *((None, None) if known is None else (format_seconds(known), f"{compute_s / known - 1:+.1%}")),
                f"{busy_s / stream.total_s:.1%}",
                memory_of(run, stage.rank),
            )
        )
    columns = ("stage", "device", "from, to", "computes", "alone", "predicted load", "off by", "busy", "peak memory")
    return Table("stages", "The stages, per microbatch", columns, tuple(rows))


def bounds_of(run: Run, stage: int) -> tuple[str, str] | None:
    """Return the cuts around a stage; None if cuts rotate."""
    facts = run.facts
    pipeline, route = next((p, route) for p, route in enumerate(facts.routes) if stage in route)
    sets = facts.plan["pipelines"][pipeline]["cut_sets"] if facts.plan is not None else [{"cuts": facts.cuts}]
    bounds = [INPUT, *sets[0]["cuts"], OUTPUT]
    place = stage - route.start
    return (bounds[place], bounds[place + 1]) if len(sets) == 1 and len(bounds) == len(route) + 1 else None


def link_table(run: Run, stream: MeasuredStream) -> Table:
    """Return each cut's messages: bytes, seconds in flight, the used rate, and the link's bandwidth."""
    rows: list[tuple[Cell, ...]] = []
    for edge, wires in stream.wires.items():
        first = edge[0] < 0
        stage = stream.stages[edge[1] if first else edge[0]]
        num_bytes = stage.mean("num_bytes_in" if first else "num_bytes_out")
        known = [b for b in (_bandwidth(run, stream, end) for end in edge) if b is not None]
        in_all = num_bytes * len(stage.steps)
        rate = in_all / stream.total_s
        rows.append(
            (
                edge_name(edge),
                format_bytes(num_bytes),
                format_bytes(in_all),
                format_seconds(statistics.median(wires)),
                format_rate(rate),
                format_rate(min(known)) if known else None,
                f"{rate / min(known):.1%}" if known else None,
            )
        )
    columns = ("link", "per microbatch", "in all", "under way", "rate in use", "bandwidth", "of it used")
    return Table("links", "The links", columns, tuple(rows))


def clock_table(run: Run) -> Table:
    """Return each process's clock offset to the driver's, and its uncertainty."""
    clocks = ((process.device, process.alignment) for process in run.processes)
    rows = tuple(
        (device, f"{clock.offset_s:.6f} s", f"{clock.drift * 1e6:.1f} ppm", format_seconds(clock.error_s))
        for device, clock in clocks
    )
    return Table("clocks", "The clocks", ("process", "offset", "drift", "known up to"), rows)


def environment_table(run: Run) -> Table:
    """Return the table of the run's environment."""
    facts = run.facts
    rows = [
        ("model", facts.model),
        ("microbatches", str(facts.num_microbatches)),
        ("threads", str(facts.threads)),
        ("depth", str(facts.depth)),
        *facts.environment.items(),
    ]
    return Table("environment", "The environment", ("what", "value"), tuple(rows))


def plan_table(run: Run, stream: MeasuredStream) -> Table:
    """Return the stages with their devices and shares of the work."""
    loads = loads_alone(stream)
    work = sum(stage.share * stage.alone_s for stage in stream.stages)
    rows: list[tuple[Cell, ...]] = []
    for stage in stream.stages:
        bounds = bounds_of(run, stage.index)
        cut = bounds[1] if bounds is not None and bounds[1] != OUTPUT else None
        part = stage.share * stage.alone_s / work
        rows.append((stage.index, stage.device, cut, f"{part:.1%}", format_seconds(loads[stage.rank])))
    columns = ("stage", "device", "cut after it", "of the seconds alone", "its device's load")
    return Table("plan", "The plan", columns, tuple(rows))


def predicted_loads(run: Run) -> dict[str, float]:
    """Return the plan's prediction for each device, in seconds per microbatch; empty without a plan."""
    if run.facts.plan is None:
        return {}
    return {load["device"]: float(load["load_s"]) for load in run.facts.plan["prediction"]["devices"]}


def memory_of(run: Run, rank: int) -> str | None:
    """Return the peak of a process's sampled memory."""
    most = max((process.peak_bytes for process in run.processes if process.rank == rank), default=0.0)
    return format_bytes(most) if most else None


def _host(run: Run, rank: int) -> str:
    return run.facts.hosts[rank] if rank < len(run.facts.hosts) else run.facts.devices[rank]


def _bandwidth(run: Run, stream: MeasuredStream, end: int) -> float | None:
    rank = stream.stages[end].rank if 0 <= end < len(stream.stages) else 0
    return run.facts.bandwidths[rank] if rank < len(run.facts.bandwidths) else None


def markdown(tables: Sequence[Table]) -> str:
    """Return tables as Markdown, each under its title."""
    return "\n".join(f"## {table.title}\n\n{table.markdown()}" for table in tables)


def generation_tables(run: Run) -> list[Table]:
    """Return the tables of a generation run; empty for other streams."""
    facts = run.facts.generation
    if facts is None:
        return []
    return [_requests(facts), _work(facts, run.facts.total_s)]


def _requests(facts: GenerationFacts) -> Table:
    first = sorted(each.came_s[0] - each.asked_s for each in facts.requests if each.came_s)
    gaps = sorted(b - a for each in facts.requests for a, b in pairwise(each.came_s))
    rows: list[tuple[Cell, ...]] = [
        ("tokens of an answer", *_three([len(each.came_s) for each in facts.requests], str)),
        ("tokens of a prompt", *_three([each.num_prompt for each in facts.requests], str)),
        ("time to the first token", *_three(first, format_seconds)),
        ("time between tokens", *_three(gaps, format_seconds)),
    ]
    return Table("requests", "Each request", ("what", "median", "99 of 100", "most"), tuple(rows))


def _three(values: Sequence[float], show: Callable[[float], str]) -> tuple[Cell, Cell, Cell]:
    """Return the median, the 99th percentile and the maximum of values."""
    if not values:
        return None, None, None
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return show(statistics.median_high(ordered)), show(ordered[at]), show(ordered[-1])


def _work(facts: GenerationFacts, total_s: float) -> Table:
    kinds = Counter(kind for kind, _ in facts.microbatches)
    right = f"{facts.num_right} of {facts.num_guesses} guessed tokens were right"
    tokens = sum(len(each.came_s) for each in facts.requests)
    held_s = sum(each.came_s[-1] - each.came_s[0] for each in facts.requests if each.came_s)
    reused = sum(each.num_reused for each in facts.requests)
    rows: list[tuple[Cell, ...]] = [
        ("requests", str(len(facts.requests)), None),
        ("tokens per second", f"{tokens / total_s:.4g}", None),
        ("slots in use, on average", f"{held_s / total_s:.1f}", f"of {facts.num_slots}"),
        ("tokens of prompts found in a cache", str(reused), None),
        ("chunks of prompts", str(kinds["prompt"]), None),
        ("steps", str(kinds["step"]), None),
        ("steps with guesses", str(kinds["guess"]), right),
    ]
    for index, num_bytes in enumerate(facts.cache_bytes):
        rows.append((f"caches of stage {index}", format_bytes(num_bytes), f"{facts.num_slots} sequences"))
    return Table("generation", "Requests, microbatches and caches", ("what", "amount", "note"), tuple(rows))
