"""The page that compares several runs: times and operators of streams, curves of training runs."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.errors import DataError, UsageError
from penstock.files import write_whole
from penstock.report.page.figures import PALETTE, Figure, timeline
from penstock.report.page.page import Text, make_page
from penstock.report.page.tables import Cell, Table, markdown
from penstock.report.page.training_figures import learning_figure, learning_lines
from penstock.report.run_report import profiled_lines
from penstock.report.stream_account import Account, make_account, shape_of
from penstock.report.stream_measured import MeasuredStream, measure_stream
from penstock.report.training_measured import METRICS_FILE, read_metrics
from penstock.tracing.trace import Run, Span, read_run
from penstock.units import format_bytes, format_seconds

_SHOWN = 25  # number of operators shown


@dataclass(frozen=True)
class Compared:
    """A recorded stream, its name in the comparison, and its row if it is one of a bench."""

    name: str
    run: Run
    row: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def stream(self) -> MeasuredStream:
        """The measurements of the stream."""
        return measure_stream(self.run)

    @cached_property
    def account(self) -> Account:
        """The account of the stream."""
        return make_account(self.run, self.stream)

    @cached_property
    def plain(self) -> MeasuredStream:
        """The stream without the steps that the profiler slowed down, unless it profiled all steps."""
        profiled = {(span.stage, span.microbatch) for span in self.run.spans if span.kind == "profile"}
        stages = []
        for stage in self.stream.stages:
            steps = tuple(step for step in stage.steps if (stage.index, step.microbatch) not in profiled)
            stages.append(replace(stage, steps=steps or stage.steps))
        return replace(self.stream, stages=tuple(stages))

    @property
    def rows_per_s(self) -> float:
        """Rows over the whole stream."""
        return self.run.facts.num_rows / self.run.facts.total_s

    def of_all_stages(self, field: str) -> float:
        """Return the mean seconds or bytes per microbatch, summed over all stages."""
        return sum(stage.share * stage.mean(field) for stage in self.plain.stages)

    def peaks(self) -> list[float]:
        """Return the peak of the sampled memory of each process."""
        return [process.peak_bytes for process in self.run.processes if process.peak_bytes]


@dataclass(slots=True)
class Operator:
    """Costs of an operator per microbatch, in all stages: calls, seconds without callees, bytes."""

    calls: float = 0.0
    seconds: float = 0.0
    num_bytes: float = 0.0

    def add(self, calls: float, seconds: float, num_bytes: float) -> None:
        """Add other calls."""
        self.calls += calls
        self.seconds += seconds
        self.num_bytes += num_bytes

    def cells(self) -> list[Cell]:
        """Format milliseconds, calls and memory for a table."""
        memory = format_bytes(self.num_bytes) if self.num_bytes else None
        return [f"{self.seconds * 1e3:.3f}", f"{self.calls:.4g}", memory]


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """The written files, the first lines, and the tables."""

    lead: tuple[str, ...]
    tables: tuple[Table, ...]
    files: tuple[Path, ...]


def write_comparison(folders: Sequence[str | os.PathLike[str]], file: str | os.PathLike[str]) -> ComparedRuns:
    """Write a page that compares several streams with the first, or the metrics of several training runs.

    Example:
        write_comparison(["runs/serial", "runs/four"], "beside.html").lead

    Writes the page, and next to it the tables as Markdown. Raises `DataError` if a folder has no complete run,
    `UsageError` for a training run beside a stream, or if the page cannot be written.
    """
    places = [Path(folder) for folder in folders]
    trained = [read_metrics(place) for place in places]
    names = [place.resolve().name for place in places]
    if len(set(names)) < len(names):
        names = [str(place) for place in places]
    if all(trained):
        runs = [(name, metrics) for name, metrics in zip(names, trained, strict=True) if metrics is not None]
        lead = [f"{name}: {line}" for name, metrics in runs for line in learning_lines(metrics)]
        tables, figures, texts = [_settings(names, places)], [learning_figure(runs)], list[Text]()
    else:
        named = _read(names, places)
        lead, tables, texts = _lead(named), [differences(named), operators(named)], [_how(named)]
        figures = [loads(named)]
        for index, each in enumerate(named):
            figure = timeline(each.run, each.stream)
            figures.append(replace(figure, key=f"{figure.key}{index}", title=f"{each.name}: {figure.title}"))
    page = make_page(" beside ".join(names), lead, figures, tables, texts)
    tables += [figure.table for figure in figures if figure.key == "learning"]
    place = Path(file)
    files = {place: page, place.with_suffix(".md"): markdown(tables)}
    write_files(files, "--output")
    return ComparedRuns(tuple(lead), tuple(tables), tuple(files))


def write_files(files: Mapping[Path, str], option: str) -> None:
    """Write a page and what belongs to it; raises `UsageError`, which names the option, if that is impossible."""
    for path, text in files.items():
        try:
            write_whole(path, text)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); choose another {option}") from None


def _settings(names: Sequence[str], folders: Sequence[Path]) -> Table:
    """Return the settings that differ between training runs."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        file = folder / "settings.json"
        try:
            document = json.loads(file.read_bytes()) if file.exists() else {}
        except (OSError, ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise DataError(f"{file} is not the settings of a training run; copy the run's folder again")
        found.append(document)
    keys = [key for key in dict.fromkeys(key for each in found for key in each) if key != "output"]
    rows = [(key, *(json.dumps(each.get(key)) for each in found)) for key in keys]
    differing = tuple(row for row in rows if len(set(row[1:])) > 1)
    return Table("settings", "Settings that differ", ("setting", *names), differing)


def _read(names: Sequence[str], folders: Sequence[Path]) -> list[Compared]:
    found = []
    for name, folder in zip(names, folders, strict=True):
        run = read_run(folder)
        if run.facts.kind != "stream":
            raise UsageError(
                f"{folder} is a training run without {METRICS_FILE}, or beside a stream; compare streams of infer "
                "--trace, or folders of penstock train"
            )
        found.append(Compared(name, run))
    return found


def _lead(named: Sequence[Compared]) -> list[str]:
    """Describe each run compared with the first."""
    first, *others = named
    lines = [f"{first.name}: {_shape(first)}, {first.rows_per_s:.4g} rows/s."]
    for each in others:
        longer = each.of_all_stages("compute_s") / first.of_all_stages("compute_s")
        faster = each.rows_per_s / first.rows_per_s
        lines.append(
            f"{each.name}: {_shape(each)}, {each.rows_per_s:.4g} rows/s, {faster:.2f} times {first.name}. For a "
            f"microbatch its stages together compute {longer:.2f} times as long, messages take them "
            f"{format_seconds(each.of_all_stages('message_s'))}, and they wait "
            f"{format_seconds(each.of_all_stages('wait_s'))}."
        )
    return lines


def _shape(each: Compared) -> str:
    return f"{each.run.facts.model} in {shape_of(each.stream)}"


def _how(named: Sequence[Compared]) -> Text:
    missing = [each.name for each in named if not any(span.kind == "profile" for span in each.run.spans)]
    lines = [
        "Seconds, bytes and calls are means per microbatch; for stages they exclude the microbatches that were "
        "profiled. An operator's seconds exclude the operators that it calls, its memory includes them; both are over "
        "all stages."
    ]
    lines += [f"{each.name}: {line}" for each in named for line in profiled_lines(each.run)]
    if missing:
        lines.append(f"No operators were recorded of {', '.join(missing)}: run again with --set torch_profiler=true.")
    return Text("how", "How to read it", lines)


def loads(named: Sequence[Compared]) -> Figure:
    """Draw the seconds of each stage alone, for each stream: equal bars are a good split."""
    most = max(len(each.plain.stages) for each in named)
    data: list[dict[str, Any]] = []
    for index in range(most):
        held = [each for each in named if index < len(each.plain.stages)]
        data.append(
            {
                "type": "bar",
                "name": f"stage {index}",
                "x": [each.name for each in held],
                "y": [round(1e3 * each.plain.stages[index].alone_s, 4) for each in held],
                "marker": {"color": PALETTE[index % len(PALETTE)]},
                "hovertemplate": "%{x}, stage " + str(index) + ": %{y:.3g} ms<extra></extra>",
            }
        )
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (
            each.name,
            s.index,
            format_seconds(s.alone_s),
            format_seconds(s.mean("compute_s")),
            format_seconds(s.mean("wait_s")),
            format_seconds(s.mean("message_s")),
        )
        for each in named
        for s in each.plain.stages
    )
    columns = ("stream", "stage", "computing alone", "computing", "waiting", "messages")
    alt = "What the stages take alone per microbatch: " + " ".join(
        f"{each.name}: {', '.join(format_seconds(s.alone_s) for s in each.plain.stages)}." for each in named
    )
    layout = {
        "barmode": "group",
        "height": 400,
        "yaxis": {"title": {"text": "ms per microbatch, alone"}},
        "xaxis": {"automargin": True, "tickangle": 30, "type": "category"},
    }
    return Figure(
        "loads",
        "How even the splits are",
        alt,
        data,
        layout,
        Table("loads", "The stages, per microbatch", columns, cells),
    )


def differences(named: Sequence[Compared]) -> Table:
    """Return the costs of the runs, one column per run."""
    first = named[0]
    rows: list[tuple[Cell, ...]] = [
        ("number of stages", *(len(each.stream.stages) for each in named)),
        ("number of microbatches", *(each.stream.num_microbatches for each in named)),
        ("rows per microbatch", *(f"{each.run.facts.num_rows / each.stream.num_microbatches:.4g}" for each in named)),
        ("threads per stage", *(each.run.facts.threads for each in named)),
        ("rows per second", *(f"{each.rows_per_s:.4g}" for each in named)),
        (f"speed-up, times {first.name}", *(f"{each.rows_per_s / first.rows_per_s:.2f}" for each in named)),
    ]
    of_each = {"computing": "compute_s", "messages": "message_s", "waiting": "wait_s", "the rest": "gap_s"}
    for what, name in of_each.items():
        cells = (format_seconds(each.of_all_stages(name)) for each in named)
        rows.append((f"{what} per microbatch, sum of all stages", *cells))
    longest = ([stage.mean("compute_s") for stage in each.plain.stages] for each in named)
    rows.append(("computing per microbatch, slowest stage", *(format_seconds(max(seconds)) for seconds in longest)))
    sent = (format_bytes(each.of_all_stages("num_bytes_out")) for each in named)
    rows.append(("sent per microbatch, sum of all stages", *sent))
    peaks = [each.peaks() for each in named]
    for what, add in (("largest process", max), ("sum of all processes", sum)):
        rows.append((f"peak memory, {what}", *(format_bytes(add(found)) if found else None for found in peaks)))
    return Table("differences", "What differs", ("quantity", *(each.name for each in named)), tuple(rows))


def operators(named: Sequence[Compared]) -> Table:
    """Return the costs of each operator in each run, including sends and waits, the longest first."""
    found = [operators_of(each.run, each.plain) for each in named]
    names = sorted({name for each in found for name in each}, key=lambda n: -max(e[n].seconds for e in found if n in e))
    rows: list[tuple[Cell, ...]] = []
    for name in names[:_SHOWN]:
        cells: list[Cell] = [name]
        for each in found:
            took = each.get(name)
            cells += [None] * 3 if took is None else took.cells()
        rows.append(tuple(cells))
    heads = (f"{each.name}: {head}" for each in named for head in ("ms", "calls", "memory"))
    return Table("operators", "Operators, per microbatch and in all stages", ("operator", *heads), tuple(rows))


def operators_of(run: Run, stream: MeasuredStream) -> Mapping[str, Operator]:
    """Return the costs of torch.profiler's operators for a microbatch in all stages, with what messages took."""
    of_stage: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for process in run.processes:
        for span in process.spans:
            if span.kind == "profile":
                of_stage[process.rank, span.stage].append(span)
    found: dict[str, Operator] = defaultdict(Operator)
    for spans in of_stage.values():
        num_profiled = len({span.microbatch for span in spans})
        for span, seconds in own_seconds(spans):
            found[span.name].add(1 / num_profiled, seconds / num_profiled, span.num_bytes / num_profiled)
    for stage in stream.stages:
        messages = {
            "(wait for a message or a buffer)": (stage.mean("wait_s"), 0.0),
            "(read a message)": (stage.mean("read_s"), stage.mean("num_bytes_in")),
            "(send a message)": (stage.mean("give_s"), stage.mean("num_bytes_out")),
        }
        for name, (seconds, num_bytes) in messages.items():
            found[name].add(1, seconds, num_bytes)
    return found


def own_seconds(spans: Iterable[Span]) -> list[tuple[Span, float]]:
    """Return the spans of a thread with their seconds, minus the seconds of spans inside them."""
    found: list[tuple[Span, float]] = []
    within: list[tuple[Span, float]] = []  # open spans, with the seconds of contained ones

    def close() -> None:
        span, inner_s = within.pop()
        found.append((span, max(0.0, span.seconds - inner_s)))
        if within:
            outer, seconds = within[-1]
            within[-1] = outer, seconds + span.seconds

    for span in sorted(spans, key=lambda each: (each.begin_s, -each.end_s)):
        while within and within[-1][0].end_s <= span.begin_s:
            close()
        within.append((span, 0.0))
    while within:
        close()
    return found
