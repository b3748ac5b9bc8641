"""Any process of a run, the first one included, stops or dies at any moment: all others say so within ten seconds."""

import itertools
import json
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.processes import PROGRAMS, Ended, free_port, run_groups

MOMENTS = ["start", "stream", "between", "leave"]
# more processes at a time than two cores carry would be lost to each other
CASES = [(0, signal.SIGSTOP), (1, signal.SIGSTOP), (2, signal.SIGSTOP), (0, signal.SIGKILL), (2, signal.SIGKILL)]
# what is promised, and what a machine with this many processes needs beside
NAMED_WITHIN_S = 10.0 + 3.0


def test_lost_worker_is_named(tmp_path: Path) -> None:
    """The groups of a moment start once those of the moment before have lost their processes, and only wait."""
    script = PROGRAMS / "lost_ranks.py"
    groups: list[Future[list[list[Ended]]]] = []
    with ThreadPoolExecutor(len(MOMENTS)) as pool:
        for moment in MOMENTS:
            cases = [
                [str(tmp_path), moment, str(victim), str(int(number)), str(free_port())] for victim, number in CASES
            ]
            groups.append(pool.submit(run_groups, script, [(3, case) for case in cases], 120.0))
            stopped = [tmp_path / f"{moment}-{victim}-{int(number)}-{victim}.json" for victim, number in CASES]
            while not groups[-1].done() and not all(file.exists() for file in stopped):
                time.sleep(0.05)
    for ended in groups:
        ended.result()
    for moment, (victim, number) in itertools.product(MOMENTS, CASES):
        told = {
            rank: json.loads((tmp_path / f"{moment}-{victim}-{int(number)}-{rank}.json").read_text())
            for rank in range(3)
        }
        assert "stopped" in told[victim], (moment, told)
        for rank in {0, 1, 2} - {victim}:
            check(told[rank], told[victim]["at_s"], moment, f"rank {victim} on ")


def check(told: dict[str, Any], stopped_s: float, moment: str, name: str) -> None:
    assert told["at_s"] - stopped_s < NAMED_WITHIN_S, (moment, told)
    if moment != "leave":
        assert told["kind"] == "DeviceLost", (moment, told)
        # who has not met all others yet knows the first process by its store alone
        if moment == "start" and name.startswith("rank 0") and "lost contact with rank 0" in told["message"]:
            return
        assert told["message"].startswith(name), (moment, told)
        assert "has not answered for" in told["message"] or "is lost" in told["message"], (moment, told)
    else:  # all the work is done: nobody fails
        assert "kind" not in told, told


def test_busy_worker_is_not_lost() -> None:
    holds = [*((busy, "stage") for busy in range(3)), (0, "inputs")]
    ended = run_groups(PROGRAMS / "busy_ranks.py", [(3, [str(busy), where]) for busy, where in holds], 120.0)
    assert all(end.status == 0 for group in ended for end in group)
