"""One process of a training run that another process has started."""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from penstock.errors import PenstockError
from penstock.recipes.launch import write_result
from penstock.recipes.loop import fit_here
from penstock.recipes.settings import read_settings


def main() -> int:
    """Train as the file says; the first process writes the result beside it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--rank", type=int, help="where torchrun's variables do not say it")
    given = parser.parse_args()
    if given.rank is not None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(given.rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_leave_with_parent, name="penstock-parent", daemon=True).start()
    writes = os.environ["RANK"] == "0"
    result = given.settings.parent / "result.json"
    try:
        found = fit_here(read_settings(given.settings))
    # whatever it is, the process that started this one tells it
    except Exception as error:
        if writes:
            write_result(result, error)
        if not isinstance(error, PenstockError) and not isinstance(error, MemoryError):
            raise
        return 1
    if writes:
        write_result(result, found)
    return 0


def _leave_with_parent() -> None:
    """The pipe on standard input closes when the parent is gone, however it went."""
    while os.read(sys.stdin.fileno(), 1):  # not through the file object, whose lock its end would want
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
