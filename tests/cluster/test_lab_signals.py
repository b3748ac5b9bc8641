"""Signals that ask a verb to end."""

from tests.processes import run_python

LATE = """
import os, signal
from penstock.cluster.lab.signals import ended_by_signals, ignore_late_signals
try:
    with ended_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
except SystemExit as end:
    ignore_late_signals(end)
    os.kill(os.getpid(), signal.SIGHUP)  # when everything has been cleaned up already
    os.kill(os.getpid(), signal.SIGTERM)
    raise
"""


ON_THE_WAY_OUT = """
import os, signal
from penstock.cluster.lab.signals import ended_by_signals
try:
    with ended_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
finally:
    os.kill(os.getpid(), signal.SIGTERM)  # behind the block, before anything else has seen the first one
"""


def test_a_second_signal_on_the_way_out_is_the_same_end() -> None:
    assert run_python("-c", ON_THE_WAY_OUT, deadline_s=60.0).status == 143


def test_a_signal_that_comes_late_changes_nothing() -> None:
    assert run_python("-c", LATE, deadline_s=60.0).status == 129
