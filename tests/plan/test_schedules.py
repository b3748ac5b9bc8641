from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.plan.schedule.custom import check_schedule
from penstock.plan.schedule.schedules import (
    SCHEDULES,
    Schedule,
    forward_only,
    gpipe,
    make_schedule,
    one_f_one_b,
    placement,
    text,
    with_recompute,
    with_updates,
    zero_bubble,
)


def lines(schedule: Schedule) -> list[str]:
    """Write a schedule of one stage per device as people do, without the stages."""
    return [" ".join(str(action).partition(".")[0] for action in actions) for actions in schedule]


def test_gpipe_runs_all_forwards_first() -> None:
    assert lines(gpipe(2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_one_f_one_b_alternates() -> None:
    assert lines(one_f_one_b(3, 4)) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_fewer_microbatches_than_stages() -> None:
    assert lines(one_f_one_b(4, 1)) == ["F0 B0"] * 4
    assert lines(zero_bubble(3, 1)) == ["F0 I0 W0", "F0 I0 W0", "F0 I0 W0"]


def test_zero_bubble_splits_backwards() -> None:
    assert lines(zero_bubble(3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaved_as_in_the_paper() -> None:
    first, second = make_schedule("interleaved", 4, 4, 2)
    assert text(first) == ("F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0")
    assert text(second) == ("F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1")


def test_a_device_with_several_stages_works_through_them_as_through_one() -> None:
    first, second = one_f_one_b(3, 1, 2)
    assert text(first) == "F0.0 F0.1 B0.1 B0.0"
    assert text(second) == "F0.2 B0.2"


def test_updates_follow_the_last_backward_of_their_stage() -> None:
    assert text(with_updates(one_f_one_b(3, 1, 2))[0]) == "F0.0 F0.1 B0.1 S.1 B0.0 S.0 U.0 U.1"
    assert text(with_updates(zero_bubble(1, 1), update=False)[0]) == "F0.0 I0.0 W0.0 S.0"


def test_a_forward_is_computed_once_more_before_each_backward() -> None:
    assert text(with_recompute(one_f_one_b(2, 2))[1]) == "F0.1 R0.1 B0.1 F1.1 R1.1 B1.1"
    assert text(with_recompute(zero_bubble(1, 1))[0]) == "F0.0 R0.0 I0.0 W0.0"


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 7), st.integers(1, 9), st.integers(1, 5))
def test_every_schedule_runs_with_any_counts(
    name: str, num_stages: int, num_microbatches: int, num_devices: int
) -> None:
    if num_devices > num_stages:
        with pytest.raises(UsageError, match="at least as many stages as devices"):
            make_schedule(name, num_stages, num_microbatches, num_devices)
        return
    schedule = make_schedule(name, num_stages, num_microbatches, num_devices)
    checked = check_schedule(with_updates(schedule))
    assert len(placement(schedule)) == num_stages
    assert 0 <= checked.bubble_fraction < 1
    if name in {"1f1b", "zero-bubble"}:
        most = -(-num_stages // num_devices) * min(num_devices, num_microbatches)
        assert max(checked.peak_in_flight) <= most
    for actions in schedule:  # the sums of gradients come out alike whatever the schedule
        for stage in {action.stage for action in actions}:
            for kinds in ("F", "B", "I", "W"):
                order = [a.microbatch for a in actions if a.stage == stage and a.kind == kinds]
                assert order == sorted(order)


def test_impossible_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match="'1f2b' is not known; use one of gpipe"):
        make_schedule("1f2b", 2, 2)
    with pytest.raises(UsageError, match="at least one stage"):
        gpipe(2, 0)


def test_interleaved_never_overfills_the_buffers_of_a_cut() -> None:
    for num_devices in range(1, 6):
        for num_stages in range(num_devices, 10):
            for num_microbatches in range(1, 14):
                check_schedule(with_updates(make_schedule("interleaved", num_stages, num_microbatches, num_devices)))


@pytest.mark.parametrize(
    ("stages", "num_microbatches", "expected"),
    [
        ([0], 3, "F0.0 F1.0 F2.0"),
        ([2, 3], 2, "F0.2 F0.3 F1.2 F1.3"),  # a device with two stages takes each microbatch through both
        ([1], None, "F0.1 F1.1 F2.1 F3.1"),  # without an end
        ([], 0, ""),
    ],
)
def test_forwards_are_in_order(stages: list[int], num_microbatches: int | None, expected: str) -> None:
    assert text(islice(forward_only(stages, num_microbatches), 4)) == expected
