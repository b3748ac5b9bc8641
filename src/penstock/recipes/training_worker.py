"""One process of a training run that another process has started."""

import argparse
import os
import signal
import sys
from pathlib import Path

from penstock.errors import PenstockError
from penstock.group.launcher import leave_with_parent
from penstock.recipes.launch import write_result
from penstock.recipes.loop import fit_here
from penstock.recipes.settings import read_settings


def main() -> int:
    """Train as the file says; the first process writes the result beside it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--rank", type=int, help="where torchrun's variables do not say it")
    parser.add_argument("--host", help="the device of a plan that this process stands for")
    given = parser.parse_args()
    if given.rank is not None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(given.rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        leave_with_parent()
    if given.host is not None:
        os.environ["PENSTOCK_HOST"] = given.host
    writes = os.environ["RANK"] == "0"
    result = given.settings.parent / "result.json"
    try:
        found = fit_here(read_settings(given.settings), holds_folder=True)
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


if __name__ == "__main__":
    sys.exit(main())
