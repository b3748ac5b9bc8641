"""`penstock bench`: compare stage counts and policies with one process, in one run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.table import Column, Table

from penstock import text
from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.cli.config import Given, named_options, settings_of, takes_config
from penstock.errors import UsageError
from penstock.plan.check import read_plan
from penstock.report.bench_page import name_of
from penstock.spec.plan import Plan
from penstock.spec.settings import BenchSettings
from penstock.terminal.progress import duration, working
from penstock.tracing.trace import Run

if TYPE_CHECKING:
    from penstock.bench.compare import Comparison


@takes_config(BenchSettings)
def bench(context: typer.Context, *, given: Given, cluster: Cluster = None, json: opt.JsonFile = None) -> None:
    """Measure a model on eager in one process, and as pipelines: images per second, speed-up, equality, seconds."""
    from penstock.bench.compare import Comparison
    from penstock.bench.references import peer_job, start_peers
    from penstock.deploy.worker import follow
    from penstock.group.entry import join_torchrun, start_local, under_torchrun
    from penstock.report.bench_page import write_bench_page
    from penstock.runtime.registry import parse_runtime
    from penstock.tensors import find_device
    from penstock.wire import FEEDER
    from penstock.zoo.models.models import load_model

    options = settings_of(BenchSettings, given)
    opt.bind_to(options.bind, cluster)
    plans = {file: read_plan(file) for file in options.plan}
    size = _microbatch_size(plans, options.microbatch_size if "microbatch_size" in named_options(context) else None)
    options = msgspec.structs.replace(options, microbatch_size=size or options.microbatch_size)
    counts = opt.parse_numbers(options.stages, "--stages")
    wanted = _Rows(counts, options.policy.split(","), options.cut, list(plans.values()), options.peer)
    wanted.check(options.device)
    choices = [
        parse_runtime(name) for name in {options.runtime, *(name for p in plans.values() for name in p.runtimes)}
    ]
    world = join_torchrun(followed=True) if under_torchrun() else None
    if world is None:
        find_device(options.device)  # before anything is started
        for choice in choices:
            choice.check_machine()
    if world is not None and world.rank != FEEDER:
        text.say(follow(world, peer_job(options.model, options.seed) if options.peer else None))
        return
    try:
        with working("loading the model") as say:
            zoo = load_model(options.model, weights=options.weights, pretrained=options.pretrained, seed=options.seed)
            say("meeting the processes")
            most = wanted.num_devices
            world = world or (start_peers(most, options.model, options.seed) if options.peer else start_local(most))
            comparison = Comparison(zoo, world, options, max_stages=most)
            measured = _measure(comparison, wanted, say, lambda rows: _write(json, options.model, comparison, rows))
        best = max((row for row, _ in measured), key=lambda row: row["speedup"])
        last_line = f"speed-up {best['speedup']:.2f} with {name_of(best)}"
        world.last_word = last_line
        world.end()
    except BaseException as error:
        if world is not None:
            world.end(error)
        raise
    report = Path(options.report) if options.report else None
    if report is not None:
        write_bench_page(report, {"model": options.model, **comparison.settings()}, measured)
    rows = [row for row, _ in measured]
    _print(rows, report)
    text.say(last_line)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to measure in addition to the serial run."""

    stages: list[int]
    policies: list[str]
    cuts: list[str]
    plans: list[Plan]
    peer: bool

    def check(self, device: str) -> None:
        """Raise `UsageError` for an unknown policy, and for `peer` on a device other than the CPU."""
        from penstock.deploy.policies import POLICIES

        for name in self.policies:
            if name not in POLICIES:
                raise UsageError(f"policy must be one of {', '.join(POLICIES)}; got {name!r}")
        if self.peer and device != "cpu":
            raise UsageError(f"peer runs only on the CPU and cannot be compared with {device}; leave one out")

    @property
    def num_devices(self) -> int:
        """Number of devices of the largest row."""
        return max([*self.stages, *(len(plan.devices) for plan in self.plans)])


def _measure(
    comparison: "Comparison", wanted: _Rows, say: Callable[[str], None], keep: Callable[[list[dict[str, Any]]], None]
) -> list[tuple[dict[str, Any], Run | None]]:
    """Measure all rows, each with a pipeline's trace; report and save each as it ends."""
    measured: list[tuple[dict[str, Any], Run | None]] = []
    measurements = list(_measurements(comparison, wanted))
    for place, (said, _, measure) in enumerate(measurements, 1):
        say(said)
        if place > 1:
            left_s = sum(comparison.expected_s(count) for _, count, _ in measurements[place - 1 :])
            text.say(f"row {place} of {len(measurements)}, about {duration(left_s)} to go", err=True)
        row = measure()
        measured.append((row, comparison.last_run if row["mode"] == "pipeline" else None))
        keep([row for row, _ in measured])
        text.say(f"{said}: {row['images_per_second']:.2f} images/s, {row['speedup']:.2f} times", err=True)
    return measured


def _write(json: Path | None, model: str, comparison: "Comparison", rows: list[dict[str, Any]]) -> None:
    opt.write_json(json, {"model": model, "settings": comparison.settings(), "rows": rows})


def _measurements(comparison: "Comparison", wanted: _Rows) -> Iterator[tuple[str, int, Callable[[], dict[str, Any]]]]:
    """Yield the rows to measure, in order: the name, the number of devices, and a function that measures it."""
    yield "serial", 1, comparison.serial
    for count in wanted.stages if wanted.peer else []:
        if count > 1:
            yield f"{count} stages, torch.distributed.pipelining", count, partial(comparison.peer, count)
    for count in wanted.stages:
        for name in wanted.policies if count > 1 else wanted.policies[:1]:
            yield f"{text.counted(count, 'stage')}, {name}", count, partial(comparison.pipeline, count, policy=name)
    for names in wanted.cuts:
        count = names.count(",") + 2
        yield f"cuts {names}", count, partial(comparison.pipeline, count, cuts=names.split(","))
    for chosen in wanted.plans:
        names = ", ".join(chosen.devices)
        yield f"the plan for {names}", len(chosen.devices), partial(comparison.planned, chosen)


def _microbatch_size(plans: Mapping[str, Plan], size: int | None) -> int | None:
    """Return the microbatch size of all rows: as given, or that of the plans; None without either."""
    for file, plan in plans.items():
        if size is not None and plan.microbatch_rows != size:
            raise UsageError(
                f"all rows of the table must have the same microbatch size; got {plan.microbatch_rows} of the plan "
                f"{file} and {size} before it; leave --microbatch-size out, and measure plans of other sizes one by one"
            )
        size = plan.microbatch_rows
    return size


def _print(rows: list[dict[str, Any]], report: Path | None) -> None:
    console = opt.make_console()
    console.print(_table(rows))
    for line in _notes(rows):
        console.print(line, soft_wrap=True)
    console.print(_stage_table(rows))
    if report is not None:
        console.print(f"the page is {report}", markup=False, soft_wrap=True)
    for row in rows:
        if row.get("limit"):
            console.print(f"{name_of(row)}: {row['limit']}", soft_wrap=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    heads = ("row", "runtime", "images/s", "speed-up, times", "efficiency, of 1", "fill, s", "outputs bit-equal")
    table = Table(*(Column(head, overflow="fold") for head in heads))
    for row in rows:
        table.add_row(
            name_of(row),
            row["runtime"],
            f"{row['images_per_second']:.2f}",
            f"{row['speedup']:.2f}",
            "" if row.get("efficiency") is None else f"{row['efficiency']:.3f}",
            "" if row["fill_s"] is None else f"{row['fill_s']:.2f}",
            _equality(row),
        )
    return table


def _stage_table(rows: list[dict[str, Any]]) -> Table:
    """Return the seconds of every stage in a pass."""
    heads = ("row", "stage", "device", "compute, s per pass", "wait, s per pass", "send, s per pass")
    table = Table(*(Column(head, overflow="fold") for head in heads))
    for row in rows:
        for number, stage in enumerate(row["per_stage"]):
            seconds = (f"{stage[name]:.2f}" for name in ("compute_s", "wait_s", "send_s"))
            table.add_row("" if number else name_of(row), str(stage["stage"]), stage["device"], *seconds)
    return table


def _notes(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the figures of the table are compared with."""
    from penstock.bench.samples import doubt_of

    serial = rows[0]["runtime"]
    yield (
        "Speed-up: times one process. Efficiency: steady rate over that of the row's devices, each with the whole "
        f"model. Fill: until the first result. Outputs are compared with one process. These references run on {serial}."
    )
    if others := sorted({row["runtime"] for row in rows} - {serial}):
        yield f"Rows on {' and '.join(others)} differ from one process by the runtime too, not by the pipeline alone."
    yield from (f"{name_of(row)}: {doubt}" for row in rows[1:] if (doubt := doubt_of(row, serial)))


def _equality(row: dict[str, Any]) -> str:
    if row["bit_equal"] is None:
        return ""
    if row["bit_equal"]:
        return "yes"
    agreement = row.get("top1_agreement")
    alike = "" if agreement is None else f", top-1 alike {agreement:.1%}"
    return f"no ({row['max_abs_difference']:.1e}{alike})"
