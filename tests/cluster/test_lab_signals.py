"""Signals that ask a verb to end."""

from tests.processes import run_python

LATE = """
import os, signal
from penstock.cluster.lab.signals import ended_by_signals
with ended_by_signals():
    pass
assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
try:
    with ended_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
finally:
    os.kill(os.getpid(), signal.SIGHUP)  # when everything has been cleaned up already
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_that_comes_late_changes_nothing() -> None:
    assert run_python("-c", LATE, deadline_s=60.0).status == 129
