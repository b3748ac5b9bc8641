import pytest

from penstock.errors import PlanError
from penstock.plan.schedule.custom import bubble_formula, clock_cycles, draw, read_schedule
from penstock.plan.schedule.schedules import forward_only, gpipe, make_schedule, one_f_one_b
from penstock.plan.schedule.simulate import simulate, uniform


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 3), (2, 4), (4, 8), (4, 12)])
def test_the_bubble_is_the_formulas(name: str, num_devices: int, num_microbatches: int) -> None:
    num_stages = num_devices * (2 if name == "interleaved" else 1)
    schedule = make_schedule(name, num_stages, num_microbatches, num_devices)
    _, expected = bubble_formula(name, num_stages, num_microbatches, num_devices)
    assert simulate(schedule).bubble_fraction == pytest.approx(expected)


def test_zero_bubble_beats_interleaved_beats_plain() -> None:
    plain, interleaved, zero = (
        simulate(make_schedule(name, stages, 8, 4)).bubble_fraction
        for name, stages in (("1f1b", 4), ("interleaved", 8), ("zero-bubble", 4))
    )
    assert zero < interleaved < plain


def test_transfers_and_uneven_devices() -> None:
    result = simulate(
        one_f_one_b(2, 1),
        lambda action, device: (3.0 if device else 1.0) * (1 if action.kind == "F" else 2),
        lambda _source, _to, kind: 0.5 if kind == "activations" else 0.25,
    )
    assert [[(span.begin_s, span.end_s) for span in spans] for spans in result.spans] == [
        [(0.0, 1.0), (10.75, 12.75)],
        [(1.5, 4.5), (4.5, 10.5)],
    ]
    assert result.makespan_s == 12.75


def test_a_link_carries_one_message_after_the_other() -> None:
    result = simulate((tuple(forward_only([0], 3)), tuple(forward_only([1], 3))), uniform(), lambda *_: 5.0)
    assert [span.begin_s for span in result.spans[1]] == [6.0, 11.0, 16.0]


def test_a_full_cut_makes_the_sender_wait() -> None:
    slow = (tuple(forward_only([0], 4)), tuple(forward_only([1], 4)))
    duration = lambda _action, device: 10.0 if device else 1.0  # noqa: E731
    assert [span.end_s for span in simulate(slow, duration, num_buffers=None).spans[0]] == [1, 2, 3, 4]
    assert [span.end_s for span in simulate(slow, duration, num_buffers=1).spans[0]] == [1, 2, 3, 12]


def test_peak_in_flight() -> None:
    assert simulate(gpipe(3, 5)).peak_in_flight == (5, 5, 5)
    assert simulate(one_f_one_b(3, 5)).peak_in_flight == (3, 2, 1)
    assert max(simulate(make_schedule("zero-bubble", 3, 5)).peak_in_flight) == 3


def test_a_schedule_that_waits_for_itself() -> None:
    with pytest.raises(PlanError, match=r"device 0 .*B0\.0, device 1 .*F1\.1"):
        simulate(read_schedule("F0 B0 F1 B1 \n F0 F1 B0 B1"))
    crossed = read_schedule("F0.0 F1.0 F2.0 F0.2 F1.2 F2.2 \n F0.1 F0.3 F1.1 F1.3 F2.1 F2.3")
    with pytest.raises(PlanError, match=r"F2\.0, .*full"):
        simulate(crossed, num_buffers=1)
    simulate(crossed, num_buffers=2)


def test_clock_cycles_of_the_gpipe_paper() -> None:
    forwards = [[str(a) if a else "" for a in tick] for tick in clock_cycles(gpipe(3, 2))[:4]]
    assert forwards == [["F0.0", "", ""], ["F1.0", "F0.1", ""], ["", "F1.1", "F0.2"], ["", "", "F1.2"]]


def test_schedule_is_drawn_as_text() -> None:
    assert draw(one_f_one_b(2, 2)) == ("device 0  F0 F1 .  .  B0 B0 .  B1 B1\ndevice 1  .  F0 B0 B0 F1 B1 B1 .  .")
