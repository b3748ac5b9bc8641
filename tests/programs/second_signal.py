"""Gets a second signal that asks it to end: on its way out, or when everything has been cleaned up already."""

import os
import signal
import sys

from penstock.cluster.lab.processes import ended_by_signals, ignore_late_signals


def late() -> None:
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    except SystemExit as end:
        ignore_late_signals(end)
        os.kill(os.getpid(), signal.SIGHUP)  # when everything has been cleaned up already
        os.kill(os.getpid(), signal.SIGTERM)
        raise


def on_the_way_out() -> None:
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # behind the block, before anything else has seen the first one


late() if sys.argv[1] == "late" else on_the_way_out()
