"""`penstock schedule`: a drawing of a training schedule, with its bubble and memory."""

from typing import Annotated, Any

import typer

from penstock.cli.options import JsonFile, make_console, write_json
from penstock.plan.schedule.actions import placement, text
from penstock.plan.schedule.picture import bubble_formula, draw, find_schedule, read_schedule
from penstock.plan.schedule.schedules import SCHEDULES, interleaves, make_schedule
from penstock.plan.schedule.validate import check_given, check_schedule

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
