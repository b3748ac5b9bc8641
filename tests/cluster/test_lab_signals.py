"""Signals that ask a verb to end."""

from tests.processes import PROGRAMS, run_python

SCRIPT = str(PROGRAMS / "second_signal.py")


def test_a_second_signal_on_the_way_out_is_the_same_end() -> None:
    assert run_python(SCRIPT, "on the way out", deadline_s=60.0).status == 143


def test_a_signal_that_comes_late_changes_nothing() -> None:
    assert run_python(SCRIPT, "late", deadline_s=60.0).status == 129
