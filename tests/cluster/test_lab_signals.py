"""Signals that ask a verb to end."""

from tests.processes import PROGRAMS, run_python

SCRIPT = str(PROGRAMS / "second_signal.py")


def test_second_signal_keeps_the_exit_status() -> None:
    assert run_python(SCRIPT, "on the way out", deadline_s=60.0).status == 143


def test_late_signal_is_ignored() -> None:
    assert run_python(SCRIPT, "late", deadline_s=60.0).status == 129
