"""Runs a command during which a signal asks it to end, and another one on its way out."""

import signal
import sys
from types import FrameType

from penstock.cluster.lab.network import SystemShell


def end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


number = int(sys.argv[1])
signal.signal(number, end)
try:
    SystemShell().run(["sh", "-c", f"kill -{number} $PPID; sleep 0.2; touch ended"])
finally:
    assert signal.getsignal(number) is end
    SystemShell().run(["touch", "cleaned"])
