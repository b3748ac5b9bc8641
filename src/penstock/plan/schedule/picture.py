"""Schedules for people: the clock-cycle view, a drawing, and the bubble's formula."""

from penstock.errors import UsageError
from penstock.plan.schedule.actions import Action, Schedule
from penstock.plan.schedule.simulate import Duration, simulate, uniform

_IDLE = "."


def clock_cycles(schedule: Schedule, duration: Duration | None = None) -> list[list[Action | None]]:
    """Return for every tick what each device does; a forward takes one tick, a backward two, a part of one one.

    >>> from penstock.plan.schedule.schedules import gpipe
    >>> [[str(action) if action else "" for action in tick] for tick in clock_cycles(gpipe(2, 2))][:3]
    [['F0.0', ''], ['F1.0', 'F0.1'], ['', 'F1.1']]
    """
    result = simulate(schedule, duration or uniform(), num_buffers=None)
    ticks: list[list[Action | None]] = [[None] * len(schedule) for _ in range(round(result.makespan_s))]
    for spans in result.spans:
        for span in spans:
            for tick in range(round(span.begin_s), round(span.end_s)):
                ticks[tick][span.device] = span.action
    return ticks


def draw(schedule: Schedule) -> str:
    """Draw what each device does over time, a line for each; `B0` over two columns is a backward.

    >>> from penstock.plan.schedule.schedules import gpipe
    >>> print(draw(gpipe(2, 1)))
    device 0  F0 .  .  .  B0 B0
    device 1  .  F0 B0 B0 .  .
    """
    ticks = clock_cycles(schedule)
    several = any(len({action.stage for action in actions}) > 1 for actions in schedule)
    lines = []
    for device in range(len(schedule)):
        cells = [_cell(tick[device], several) for tick in ticks]
        lines.append((f"device {device}", cells))
    width = max((len(cell) for _, cells in lines for cell in cells), default=0)
    first = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{first}}  {' '.join(f'{c:{width}}' for c in cells)}".rstrip() for name, cells in lines)


def _cell(action: Action | None, several: bool) -> str:
    if action is None:
        return _IDLE
    return str(action) if several else f"{action.kind}{action.microbatch}"


def bubble_formula(name: str, num_stages: int, num_microbatches: int, num_devices: int) -> tuple[str, float]:
    """Return a schedule's bubble by its paper's formula, for stages alike with forward 1 and backward 2.

    With p devices, m microbatches and v stages on each device. Raises `UsageError` for a name not known.
    """
    p, m, v = num_devices, num_microbatches, num_stages / num_devices
    if name in {"gpipe", "1f1b"}:
        return "(p-1) / (m+p-1)", (p - 1) / (m + p - 1)
    if name == "interleaved":
        return "(p-1) / (v*m+p-1)", (p - 1) / (v * m + p - 1)
    if name == "zero-bubble":  # (p-1)(F+I-W) of m(F+I+W) and that, with F = I = W
        return "(p-1) / (3*m+p-1)", (p - 1) / (3 * m + p - 1)
    raise UsageError(f"no formula is known for the bubble of the schedule {name!r}")
