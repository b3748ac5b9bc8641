"""Validation of any schedule, built-in or custom."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.errors import PlanError, UsageError
from penstock.plan.schedule.actions import STAGE_KINDS, Action, Kind, Schedule, placement
from penstock.plan.schedule.simulate import Simulation, simulate
from penstock.wire import NUM_BUFFERS

_NEEDS: Mapping[str, Kind] = {"B": "F", "I": "F", "W": "I"}


def check_schedule(schedule: Schedule, *, num_buffers: int | None = NUM_BUFFERS) -> Simulation:
    """Check that a schedule can run, and return its simulation with equal times for all actions.

    - each stage is on one device, and none is missing between the first and the last;
    - each stage runs each microbatch forward once, and backward once or not at all, split or whole;
    - a forward is before its backward, and the inputs' half before the weights' half;
    - neighbours send and receive in the same order, since channels are ordered;
    - devices never wait for each other in a circle with `num_buffers` buffers.

    Example:
        check_schedule(read_schedule(text)).peak_in_flight

    Raises `PlanError` naming the action that violates a rule.
    """
    _check_places(schedule)
    for device, actions in enumerate(schedule):
        _check_order(device, actions)
    _check_complete(schedule)
    _check_channels(schedule)
    return simulate(schedule, num_buffers=num_buffers)


def check_given(schedule: Schedule, *, num_buffers: int | None = NUM_BUFFERS) -> Simulation:
    """Check a custom schedule as `check_schedule` does, but raise `UsageError` instead of `PlanError`."""
    try:
        return check_schedule(schedule, num_buffers=num_buffers)
    except PlanError as error:
        raise UsageError(str(error)) from error


def _check_places(schedule: Schedule) -> None:
    devices = placement(schedule)
    for device, actions in enumerate(schedule):
        for action in actions:
            if devices[action.stage] != device:
                raise PlanError(
                    f"stage {action.stage} is on device {device} and on device {devices[action.stage]}; "
                    "a stage must be on one device"
                )
    missing = set(range(max(devices, default=-1) + 1)) - set(devices)
    if missing:
        raise PlanError(
            f"stage {min(missing)} is assigned to no device; add actions for every stage from 0 to {max(devices)}"
        )


def _check_order(device: int, actions: Sequence[Action]) -> None:
    done: set[Action] = set()
    for action in actions:
        needs = _NEEDS.get(action.kind)
        if action in done:
            raise PlanError(f"device {device} does {action} twice; remove one")
        if needs and Action(needs, action.microbatch, action.stage) not in done:
            raise PlanError(f"device {device} does {action} before {needs}{str(action)[1:]}; change their order")
        if action.kind in STAGE_KINDS and any(
            a.kind not in STAGE_KINDS and a.stage == action.stage for a in actions[len(done) :]
        ):
            raise PlanError(f"device {device} does {action} before the stage's last backward; move it to the end")
        done.add(action)


def _check_complete(schedule: Schedule) -> None:
    forward: dict[int, set[int]] = defaultdict(set)
    backward: Counter[tuple[int, int, str]] = Counter()
    for actions in schedule:
        for action in actions:
            if action.kind == "F":
                forward[action.stage].add(action.microbatch)
            elif action.kind not in STAGE_KINDS:
                backward[action.stage, action.microbatch, action.kind] += 1
    microbatches = set().union(*forward.values())
    if microbatches != set(range(len(microbatches))):
        raise PlanError(f"microbatches must be numbered from 0 without gaps; got {sorted(microbatches)}")
    for stage in placement(schedule):
        for microbatch in range(len(microbatches)):
            whole, inputs, weights = (backward[stage, microbatch, kind] for kind in "BIW")
            wanted = [(0, 0, 0)] if not backward else [(1, 0, 0), (0, 1, 1)]
            if microbatch not in forward[stage]:
                raise PlanError(f"F{microbatch}.{stage} is missing; every stage takes every microbatch")
            if (whole, inputs, weights) not in wanted:
                raise PlanError(
                    f"microbatch {microbatch} must have one B, or one I and one W, on stage {stage}; got {whole} B, "
                    f"{inputs} I and {weights} W"
                )


def _check_channels(schedule: Schedule) -> None:
    """Check that receivers take messages in the order in which they are sent."""
    made: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for actions in schedule:
        for action in actions:
            if action.kind in {"F", "B", "I"}:
                made[action.stage, action.kind == "F"].append(action.microbatch)
    for earlier, later in pairwise(sorted(placement(schedule))):
        for forward, sender, receiver in ((True, earlier, later), (False, later, earlier)):
            sent, taken = made[sender, forward], made[receiver, forward]
            for a, b in zip(sent, taken, strict=True):
                if a != b:
                    what = "activations" if forward else "gradients"
                    raise PlanError(
                        f"stage {sender} sends the {what} of microbatch {a}, but stage {receiver} expects those of "
                        f"{b}; give both the same order"
                    )
