"""A process of a training run, started by another process."""

import argparse
import os
import signal
import sys
from pathlib import Path

from penstock.errors import PenstockError
from penstock.group.launcher import leave_with_parent
from penstock.resources import share_arena
from penstock.terminal.progress import working


def main() -> int:
    """Train with the settings in a file; the first process writes the result next to this file."""
    share_arena()
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--rank", type=int, help="rank of this process, if torchrun's variables are not set")
    parser.add_argument("--host", help="device of a plan that this process represents")
    given = parser.parse_args()
    if given.rank is not None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(given.rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        leave_with_parent()
    if given.host is not None:
        os.environ["PENSTOCK_HOST"] = given.host
    writes = os.environ["RANK"] == "0"
    with working(f"starting {os.environ.get('WORLD_SIZE', '1')} processes", shown=writes):
        from penstock.recipes.launch import fit_here, write_result
        from penstock.recipes.settings import read_settings
    result = given.settings.parent / "result.json"
    try:
        found = fit_here(read_settings(given.settings), holds_folder=True)
    # the process that started this one reports the error
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
