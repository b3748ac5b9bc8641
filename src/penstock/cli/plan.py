"""`penstock plan` and `penstock schedule`: the cuts for a cluster, and a drawing of a training schedule."""

from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from msgspec import Meta

from penstock.cli.config import Given, takes_settings
from penstock.cli.options import JsonFile, Written, make_console, parse_numbers, write_json
from penstock.errors import UsageError
from penstock.plan.candidates import PlanAim, PlanRequest
from penstock.plan.choose import choose
from penstock.plan.cost.training_step import ADAMW_STATE
from penstock.plan.explain import explain, load_lines, noise_lines, summary, what_would_help
from penstock.plan.schedule.custom import (
    bubble_formula,
    check_given,
    check_schedule,
    draw,
    find_schedule,
    read_schedule,
)
from penstock.plan.schedule.schedules import SCHEDULES, interleaves, make_schedule, placement, text
from penstock.spec.cluster import read_cluster
from penstock.spec.plan import write_plan
from penstock.spec.profile import read_profile
from penstock.terminal.progress import working
from penstock.tracing.record import RECORDING_BYTES
from penstock.units import format_bytes

_AIMS = ("throughput", "latency", "devices")
_SCHEDULES = ("forward-only", *SCHEDULES)
_Count = Annotated[int, Meta(ge=1)]
_BOTH: dict[str, Any] = {"flags": []}  # --name and --no-name
_NAMES = "".join(f"{name}: {known.help}; " for name, known in SCHEDULES.items())


def schedule(
    schedule: Annotated[str, typer.Argument(metavar="NAME", help=f"{_NAMES}or a file.")],
    stages: Annotated[int, typer.Option(min=1, help="Number of stages.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Number of microbatches.")] = 8,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices. Default: one per stage, half of that if interleaved.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Draw a training schedule, and print its bubble and memory."""
    if interleaves(schedule) and devices is None:
        devices = max(1, stages // 2)
    known = schedule in SCHEDULES
    actions = (
        make_schedule(schedule, stages, microbatches, devices) if known else read_schedule(find_schedule(schedule))
    )
    checked = check_schedule(actions) if known else check_given(actions)
    result: dict[str, Any] = {
        "schedule": schedule,
        "devices": [text(device) for device in actions],
        "bubble": checked.bubble_fraction,
        "peak_in_flight": list(checked.peak_in_flight),
    }
    console = make_console()
    console.print(draw(actions), markup=False, soft_wrap=True)
    console.print(f"bubble {checked.bubble_fraction:.1%} simulated, forward 1 and backward 2")
    num_stages = len(placement(actions))
    if known and num_stages % len(actions) == 0:
        formula, value = bubble_formula(schedule, num_stages, microbatches, len(actions))
        result["bubble_by_formula"] = value
        console.print(f"bubble {value:.1%} by the formula {formula}", markup=False)
    per_device = ", ".join(str(number) for number in checked.peak_in_flight)
    of = "microbatches" if num_stages == len(actions) else "microbatches, counted on each of a device's stages,"
    console.print(f"{of} in flight at the peak, by device: {per_device}")
    write_json(json, result)


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of a plan, as given; a field with a description is an option."""

    aim: Annotated[str, Meta(description="Objective: throughput, latency, or devices (the fewest for --target).")] = (
        "throughput"
    )
    target: Annotated[float | None, Meta(description="Required rows per second with --aim devices.")] = None
    rows: Annotated[str | None, Meta(description="Microbatch sizes to choose from, like 1,2,4.")] = None
    num_rows: Annotated[int, Meta(ge=1, description="Rows of the predicted stream.")] = 500
    depth: Annotated[int, Meta(ge=1, description="Microbatches that may wait at a cut.")] = 2
    schedule: Annotated[str, Meta(description=f"Schedule: forward-only, or for training {', '.join(SCHEDULES)}.")] = (
        "forward-only"
    )
    batch_size: Annotated[_Count | None, Meta(description="Rows of a training step over all replicas.")] = None
    microbatches: Annotated[
        _Count | None, Meta(description="Microbatches of a training step over all replicas, instead of --batch-size.")
    ] = None
    optimizer_state: Annotated[
        float | None,
        Meta(
            description="Bytes of optimizer state per byte of weights. Default in training: 2 (AdamW).",
            extra={"min": 0},
        ),
    ] = None
    alternate: Annotated[bool, Meta(description="Rotate microbatches over several cut sets.", extra=_BOTH)] = True
    replicas: Annotated[bool, Meta(description="Also consider parallel pipelines.", extra=_BOTH)] = True
    max_error: Annotated[
        float | None,
        Meta(description="Allow a faster runtime if its relative output error is at most this.", extra={"min": 0}),
    ] = None
    trace: Annotated[
        bool, Meta(description=f"Reserve {format_bytes(RECORDING_BYTES)} per device for `infer --trace`.", extra=_BOTH)
    ] = True

    def request(self) -> PlanRequest:
        """Return the planner's request; raises `UsageError` for options that exclude each other."""
        if self.aim not in _AIMS:
            raise UsageError(f"--aim must be one of {', '.join(_AIMS)}; got {self.aim!r}")
        if self.schedule not in _SCHEDULES:
            raise UsageError(f"--schedule must be one of {', '.join(_SCHEDULES)}; got {self.schedule!r}")
        if self.target is not None and self.aim != "devices":
            raise UsageError("--target needs --aim devices; leave it out or add --aim devices")
        state = self.optimizer_state
        if state is None:
            state = 0.0 if self.schedule == "forward-only" else ADAMW_STATE
        return PlanRequest(
            aim=cast(PlanAim, self.aim),
            target_rows_per_s=self.target,
            num_rows=self.num_rows,
            depth=self.depth,
            rows=tuple(parse_numbers(self.rows, "--rows")) if self.rows else (),
            schedule=self.schedule,
            num_microbatches=self.microbatches,
            batch_rows=self.batch_size,
            optimizer_state_factor=state,
            alternate=self.alternate,
            replicas=self.replicas,
            recording_bytes=float(RECORDING_BYTES) if self.trace else 0.0,
            max_error=self.max_error,
        )


@takes_settings(PlanOptions, {})
def plan(
    *,
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile written by `penstock profile`.")],
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="Cluster file or lab file.")],
    output: Annotated[
        Path | None, Written(), typer.Option("-o", "--output", metavar="plan.json", help="File to write.")
    ] = None,
    given: Given,
    explanation: Annotated[bool, typer.Option("--explain", help="Print reasons and possible improvements.")] = False,
    json: JsonFile = None,
) -> None:
    """Choose a plan for a profiled model on a cluster, and predict its performance."""
    request = PlanOptions(**given).request()
    measured, devices = read_profile(profile), read_cluster(cluster)
    console = make_console()
    with working(f"planning for {len(devices.devices)} devices"):
        choice = choose(measured, devices, request)
        helps = what_would_help(choice, measured, devices, request) if explanation else []
    lines = (
        explain(choice, devices, helps) if explanation else [summary(choice.plan), *load_lines(choice.plan, devices)]
    )
    for line in (*lines, *noise_lines(choice, measured)):
        console.print(line, markup=False, soft_wrap=True)
    if output is not None:
        write_plan(output, choice.plan)
    others = [
        {"kind": c.kind, "rows": c.rows, "num_devices": c.num_devices, "rows_per_s": c.prediction.rows_per_s}
        for c in choice.others
    ]
    result = {
        "noise": measured.noise(choice.best.rows),
        "plan": choice.plan,
        "kind": choice.best.kind,
        "exact": choice.best.exact,
        "others": others,
        "helps": [{"change": h.change, "rows_per_s": h.rows_per_s, "gain": h.gain} for h in helps],
    }
    write_json(json, result)
