from itertools import islice

from penstock.plan.schedule.actions import Action, forward_only, text


def test_one_stage_runs_its_microbatches_in_order() -> None:
    assert text(forward_only([0], num_microbatches=3)) == "F0.0 F1.0 F2.0"


def test_a_device_with_two_stages_takes_each_microbatch_through_both() -> None:
    assert text(forward_only([2, 3], num_microbatches=2)) == "F0.2 F0.3 F1.2 F1.3"


def test_forward_actions_need_no_total() -> None:
    assert text(islice(forward_only([1]), 4)) == "F0.1 F1.1 F2.1 F3.1"


def test_actions_are_values() -> None:
    assert list(forward_only([1], 1)) == [Action("F", 0, 1)]
    assert text([]) == ""
