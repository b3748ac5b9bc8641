"""Any process of a run, the first one included, stops or dies at any moment: all others say so within ten seconds."""

import itertools
import json
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.processes import Ended, free_port, run_groups

MOMENTS = ["start", "stream", "between", "leave"]
# more processes at a time than two cores carry would be lost to each other
CASES = [(0, signal.SIGSTOP), (1, signal.SIGSTOP), (2, signal.SIGSTOP), (0, signal.SIGKILL), (2, signal.SIGKILL)]
# what is promised, and what a machine with this many processes needs beside
NAMED_WITHIN_S = 10.0 + 3.0

SCRIPT = """
import json, os, signal, sys, time, warnings
from pathlib import Path
import torch
from penstock.deploy import worker
from penstock.group import entry, links, world as world_module
from penstock.runtime.eager import Runtime
from penstock.errors import PenstockError
from penstock.pipeline import Pipeline
from tests.worlds import tower, tower_inputs

folder, moment, victim, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rank = int(os.environ["RANK"])
# as when started by hand: the first process serves the store, and takes it with it
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
os.environ["MASTER_PORT"] = sys.argv[5]


def tell(**what):
    (folder / f"{moment}-{victim}-{number}-{rank}.json").write_text(json.dumps({"at_s": time.monotonic(), **what}))


def stop_here(*_args, **_named):
    tell(stopped=True)
    if number == signal.SIGSTOP and not os.fork():
        others = [folder / f"{moment}-{victim}-{number}-{other}.json" for other in range(3) if other != victim]
        late_s = time.monotonic() + 16  # longer than what is promised
        while time.monotonic() < late_s and not all(other.exists() for other in others):
            time.sleep(0.1)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), number)
    time.sleep(120)  # another thread may take the signal first, and this one would go on meanwhile


if rank == victim:
    if moment == "start":
        links._connect = stop_here
    elif moment == "stream" and rank:
        calls, run = [], Runtime.__call__
        Runtime.__call__ = lambda *given: (stop_here() if len(calls) == 3 else calls.append(0)) or run(*given)
    elif moment == "between" and rank:
        worker.follow_stages = lambda *_given: stop_here
    elif moment == "leave":
        said = world_module.receive_bytes
        if rank:
            worker.send_bytes = stop_here
        else:
            world_module.receive_bytes = lambda *given, **named: (
                stop_here() if sys._getframe(1).f_code.co_name == "_say_leave" else said(*given, **named))


def feed(count):
    for index, (x, rows) in enumerate(tower_inputs(count)):
        if rank == victim and moment == "stream" and index == 5:
            stop_here()
        yield x, rows


caught, message = [], ""
try:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world = entry.join_torchrun(followed=True)
        if rank:
            message = worker.follow(world)
        else:
            model = tower()
            with world:
                with Pipeline(model, tower_inputs(1)[0], stages=3, world=world, threads=1) as pipe:
                    assert len(list(pipe.stream(feed(8)))) == 8
                    if moment == "between":
                        if not victim:
                            stop_here()
                        time.sleep(2.0)
                    assert len(list(pipe.stream(feed(8)))) == 8
                world.last_word = "fine"
    tell(message=message, warned=[str(w.message) for w in caught])
except PenstockError as error:
    tell(kind=type(error).__name__, message=str(error))
"""


def test_whoever_is_lost_is_named(tmp_path: Path) -> None:
    """The groups of a moment start once those of the moment before have lost their processes, and only wait."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
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


BUSY = """
import ctypes, os, sys, time
from penstock.deploy import worker
from penstock.group import entry, world as world_module
from penstock.runtime.eager import Runtime
from penstock.pipeline import Pipeline
from tests.worlds import tower, tower_inputs

rank, busy, where = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]
calls, run = [], Runtime.__call__


def hold():
    ctypes.PyDLL(None).usleep(7_500_000)  # as a C extension that computes and keeps the interpreter's lock


def held(*given):
    calls.append(0)
    if rank == busy and where == "stage" and len(calls) == 3:
        hold()
    return run(*given)


def feed():
    for index, given in enumerate(tower_inputs(8)):
        if where == "inputs" and index == 4:
            hold()
        yield given


Runtime.__call__ = held
world = entry.join_torchrun(followed=True)
if rank:
    worker.follow(world)
else:
    with world:
        with Pipeline(tower(), tower_inputs(1)[0], stages=3, world=world, threads=1) as pipe:
            assert len(list(pipe.stream(feed()))) == 8
"""


def test_who_is_busy_is_not_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BUSY)
    holds = [*((busy, "stage") for busy in range(3)), (0, "inputs")]
    ended = run_groups(script, [(3, [str(busy), where]) for busy, where in holds], 120.0)
    assert all(end.status == 0 for group in ended for end in group)
