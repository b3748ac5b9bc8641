"""`penstock bench`: stage counts and policies against one process, in one run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from penstock.bench.options import BenchOptions
from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.cli.settings_options import Given, takes_settings
from penstock.errors import UsageError
from penstock.plan.check import read_plan
from penstock.spec.plan import Plan
from penstock.terminal import notes
from penstock.terminal.progress import duration, working
from penstock.tracing.trace import Run

if TYPE_CHECKING:
    from penstock.bench.compare import Comparison

_SHARED = {"microbatch_size": opt.MicrobatchSize, "seed": opt.Seed, "threads": opt.Threads, "device": opt.ComputesOn,
           "runtime": opt.Runtime}  # fmt: skip


@takes_settings(BenchOptions, _SHARED)
def bench(
    *,
    model: opt.Model,
    stages: Annotated[str, typer.Option(help="Stage counts, like 1,2,4.")] = "1,2,4",
    policy: Annotated[str, typer.Option(help="Policies: balanced,equal-blocks,equal-size,smallest-crossing.")] = (
        "balanced"
    ),
    cut: Annotated[
        list[str] | None, typer.Option("--cut", metavar="A:after,B:after", help="Cuts of an additional row.")
    ] = None,
    plan: Annotated[
        list[Path] | None, typer.Option("--plan", metavar="plan.json", help="Plan of an additional row.")
    ] = None,
    given: Given,
    peer: Annotated[bool, typer.Option("--peer", help="Comparison with torch.distributed.pipelining.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="PAGE.html", help="Page that compares the rows.")
    ] = None,
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    bind: opt.Bind = None,
    cluster: Cluster = None,
    json: opt.JsonFile = None,
) -> None:
    """Measure a model serially and as pipelines: images per second, speed-up, equality, time per activity."""
    from penstock.bench.compare import Comparison
    from penstock.bench.peer import peer_job, start_peers
    from penstock.deploy.worker import follow
    from penstock.group.entry import join_torchrun, start_local, under_torchrun
    from penstock.report.comparison import write_comparison
    from penstock.runtime.registry import parse_runtime
    from penstock.tensors import find_device
    from penstock.wire import FEEDER
    from penstock.zoo.models.models import load_model

    opt.bind_to(bind, cluster)
    options = BenchOptions(**given, trace=report is not None)
    plans = [_read_plan(file, options.microbatch_size) for file in plan or []]
    wanted = _Rows(opt.parse_numbers(stages, "--stages"), policy.split(","), cut or [], plans, peer)
    wanted.check(options.device)
    parse_runtime(options.runtime)  # before the model is loaded
    world = join_torchrun(followed=True) if under_torchrun() else None
    if world is None:
        find_device(options.device)  # before anything is started
    if world is not None and world.rank != FEEDER:
        notes.say(follow(world, peer_job(model, options.seed) if peer else None))
        return
    try:
        with working("loading the model") as say:
            zoo = load_model(model, weights=weights, pretrained=pretrained, seed=options.seed)
            say("meeting the processes")
            most = wanted.num_devices
            world = world or (start_peers(most, model, options.seed) if peer else start_local(most))
            comparison = Comparison(zoo, world, options, max_stages=most)
            measured = _measure(comparison, wanted, say, lambda rows: _write(json, model, comparison, rows))
        best = max((row for row, _ in measured), key=lambda row: row["speedup"])
        last_line = f"speed-up {best['speedup']:.2f} with {best['stages']} stages ({best['policy'] or 'serial'})"
        world.last_word = last_line
        world.end()
    except BaseException as error:
        if world is not None:
            world.end(error)
        raise
    if report is not None:
        write_comparison(report, {"model": model, **comparison.settings()}, measured)
    rows = [row for row, _ in measured]
    _print(rows, report)
    notes.say(last_line)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to measure in addition to the serial run."""

    stages: list[int]
    policies: list[str]
    cuts: list[str]
    plans: list[Plan]
    peer: bool

    def check(self, device: str) -> None:
        """Raise `UsageError` for an unknown policy, and for --peer on a device other than the CPU."""
        from penstock.deploy.policies import POLICIES

        for name in self.policies:
            if name not in POLICIES:
                raise UsageError(f"policy must be one of {', '.join(POLICIES)}; got {name!r}")
        if self.peer and device != "cpu":
            raise UsageError(f"--peer runs only on the CPU and cannot be compared with {device}; leave one out")

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
            notes.say(f"row {place} of {len(measurements)}, about {duration(left_s)} to go", err=True)
        row = measure()
        measured.append((row, comparison.last_run if row["mode"] == "pipeline" else None))
        keep([row for row, _ in measured])
        notes.say(f"{said}: {row['images_per_second']:.2f} images/s, {row['speedup']:.2f} times", err=True)
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
            yield f"{count} stages, {name}", count, partial(comparison.pipeline, count, policy=name)
    for names in wanted.cuts:
        count = names.count(",") + 2
        yield f"cuts {names}", count, partial(comparison.pipeline, count, cuts=names.split(","))
    for chosen in wanted.plans:
        names = ", ".join(chosen.devices)
        yield f"the plan for {names}", len(chosen.devices), partial(comparison.planned, chosen)


def _read_plan(file: Path, microbatch_size: int) -> Plan:
    plan = read_plan(file)
    if plan.microbatch_rows != microbatch_size:
        raise UsageError(
            f"all rows of the table must have the same microbatch size, but the plan {file} has microbatches of "
            f"{plan.microbatch_rows} images and --microbatch-size is {microbatch_size}; give "
            f"--microbatch-size {plan.microbatch_rows}"
        )
    return plan


def _print(rows: list[dict[str, Any]], report: Path | None) -> None:
    console = opt.make_console()
    console.print(_table(rows))
    if report is not None:
        console.print(f"the page is {report}", markup=False, soft_wrap=True)
    for row in rows:
        if row.get("limit"):
            console.print(f"{row['stages']} stages, {row['policy']}: the pace is set by {row['limit']}")


def _table(rows: list[dict[str, Any]]) -> Table:
    heads = ("mode", "stages", "policy", "images/s", "speed-up", "efficiency", "fill", "bit-equal")
    table = Table(*heads, "compute / wait / send per stage")
    for row in rows:
        table.add_row(
            row["mode"], str(row["stages"]), row["policy"] or "",
            f"{row['images_per_second']:.2f}", f"{row['speedup']:.2f}",
            "" if row.get("efficiency") is None else f"{row['efficiency']:.3f}",
            "" if row["fill_s"] is None else f"{row['fill_s']:.2f} s", _equality(row),
            "  ".join(f"{s['compute_s']:.1f}/{s['wait_s']:.1f}/{s['send_s']:.1f}" for s in row["per_stage"]),
        )  # fmt: skip
    return table


def _equality(row: dict[str, Any]) -> str:
    if row["bit_equal"] is None:
        return ""
    if row["bit_equal"]:
        return "yes"
    agreement = row.get("top1_agreement")
    alike = "" if agreement is None else f", top-1 alike {agreement:.1%}"
    return f"no ({row['max_abs_difference']:.1e}{alike})"
