"""`penstock plan`: choose stages, devices, cut sets, replicas and microbatch size."""

from pathlib import Path
from typing import Annotated, cast, get_args

import msgspec
import typer

from penstock.cli.options import JsonFile, make_console, parse_numbers, write_json
from penstock.errors import UsageError
from penstock.plan.choose import choose
from penstock.plan.cost.training_step import ADAMW_STATE
from penstock.plan.explain import explain, load_lines, summary, what_would_help
from penstock.plan.request import PlanAim, Request
from penstock.spec.cluster import read_cluster
from penstock.spec.plan import Schedule, write_plan
from penstock.spec.profile import read_profile
from penstock.terminal.progress import working
from penstock.tracing.record import RECORDING_BYTES
from penstock.units import format_bytes

_AIMS = ("throughput", "latency", "devices")
_SCHEDULES = get_args(Schedule)


def plan(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="What `penstock profile` wrote.")],
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster file or a lab file.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="plan.json", help="Write it here.")] = None,
    aim: Annotated[str, typer.Option(help="throughput, latency, or devices: the fewest for --target.")] = "throughput",
    target: Annotated[float | None, typer.Option(help="Rows per second to reach with --aim devices.")] = None,
    rows: Annotated[str | None, typer.Option(help="Microbatch sizes to choose from, like 1,2,4.")] = None,
    num_rows: Annotated[int, typer.Option(min=1, help="Rows of the stream that is predicted.")] = 500,
    depth: Annotated[int, typer.Option(min=1, help="Microbatches that may wait at a cut.")] = 2,
    schedule: Annotated[
        str, typer.Option(help="forward-only; to train gpipe, 1f1b, interleaved or zero-bubble.")
    ] = "forward-only",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows of a training step, all replicas.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Or its microbatches, all replicas.")] = None,
    optimizer_state: Annotated[
        float | None, typer.Option(min=0, help="Bytes per byte of weights; in training AdamW's 2 if not given.")
    ] = None,
    alternate: Annotated[bool, typer.Option(help="Let microbatches take turns on several cut sets.")] = True,
    replicas: Annotated[bool, typer.Option(help="Also consider whole pipelines side by side.")] = True,
    shared: Annotated[bool, typer.Option(help="Also consider stages that several devices share.")] = False,
    trace: Annotated[
        bool, typer.Option(help=f"Keep {format_bytes(RECORDING_BYTES)} free on every device, for --trace.")
    ] = True,
    explanation: Annotated[bool, typer.Option("--explain", help="Say why, and what would help.")] = False,
    json: JsonFile = None,
) -> None:
    """Choose how to run a profiled model on a cluster, and predict what that will do."""
    if aim not in _AIMS:
        raise UsageError(f"--aim is one of {', '.join(_AIMS)}, not {aim!r}")
    if schedule not in _SCHEDULES:
        raise UsageError(f"--schedule is one of {', '.join(_SCHEDULES)}, not {schedule!r}")
    if target is not None and aim != "devices":
        raise UsageError("--target goes with --aim devices; leave it out or add --aim devices")
    if optimizer_state is None:
        optimizer_state = 0.0 if schedule == "forward-only" else ADAMW_STATE
    request = Request(
        aim=cast(PlanAim, aim), target_rows_per_s=target, num_rows=num_rows, depth=depth,
        rows=tuple(parse_numbers(rows, "--rows")) if rows else (),
        schedule=cast(Schedule, schedule), num_microbatches=microbatches, batch_rows=batch_size,
        optimizer_state_factor=optimizer_state,
        alternate=alternate, replicas=replicas, shared=shared, recording_bytes=float(RECORDING_BYTES) if trace else 0.0,
    )  # fmt: skip
    measured, devices = read_profile(profile), read_cluster(cluster)
    console = make_console()
    with working(f"planning for {len(devices.devices)} devices"):
        choice = choose(measured, devices, request)
        helps = what_would_help(choice, measured, devices, request) if explanation else []
    lines = (
        explain(choice, devices, helps) if explanation else [summary(choice.plan), *load_lines(choice.plan, devices)]
    )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if output is not None:
        write_plan(output, choice.plan)
    others = [
        {"kind": c.kind, "rows": c.rows, "num_devices": c.num_devices, "rows_per_s": c.prediction.rows_per_s}
        for c in choice.others
    ]
    result = {
        "plan": msgspec.to_builtins(choice.plan), "kind": choice.best.kind, "exact": choice.best.exact,
        "others": others, "helps": [{"change": h.change, "rows_per_s": h.rows_per_s, "gain": h.gain} for h in helps],
    }  # fmt: skip
    write_json(json, result)
