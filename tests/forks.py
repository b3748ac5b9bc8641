"""A script's processes, forked from one that has imported everything: imports and a first capture take seconds each.

What torchrun would set in their environment is set; that torchrun itself starts the script is for one test to show.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.processes import run_python

# what makes a first capture slow is imported in the course of it
_WARM = """
import penstock
from tests.train.test_pipeline import images, small
penstock.split(small(), images(2)[:1], stages=2)
"""


@dataclass(frozen=True)
class Ended:
    """How a forked process ended: its status (minus the signal that killed it), and when."""

    status: int
    at_s: float


def run_forked(
    script: Path, groups: Sequence[tuple[int, Sequence[str]]], deadline_s: float, *, warm: str = ""
) -> list[list[Ended]]:
    """Run groups of processes at once, each `(num_processes, arguments of the script)`; 0 is one without torchrun.

    `warm` is run before, beside the imports. Gives how the processes of each group ended. What they print to the
    standard error is in the failure.
    """
    found = run_python("-m", "tests.forks", json.dumps([str(script), groups, warm]), deadline_s=deadline_s)
    assert found.status == 0, found.stderr
    ended = json.loads(found.stdout.splitlines()[-1])
    assert all(end[0] <= 0 for group in ended for end in group), found.stderr
    return [[Ended(*end) for end in group] for group in ended]


def _environment(size: int, listener: socket.socket) -> list[dict[str, str]]:
    """Give each process of a group what torchrun would."""
    if not size:
        return [{}]
    meeting = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "WORLD_SIZE": str(size),
    }  # fmt: skip
    return [meeting | {"RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"} for rank in range(size)]


def _fork(
    script: str, arguments: Sequence[str], environment: dict[str, str], listeners: Sequence[socket.socket]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    for listener in listeners:
        listener.close()
    try:
        os.environ.update(environment)
        sys.argv = [script, *arguments]
        exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _main(script: str, groups: list[tuple[int, list[str]]], warm: str) -> None:
    exec(_WARM + warm, {})
    # taken before anybody else can, and served once there are processes: a store has threads
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in groups]
    environments = [_environment(size, taken) for (size, _), taken in zip(groups, listeners, strict=True)]
    processes = [
        [_fork(script, arguments, env, listeners) for env in group]
        for group, (_, arguments) in zip(environments, groups, strict=True)
    ]
    stores = [
        TCPStore(
            "127.0.0.1", taken.getsockname()[1], None, True, wait_for_workers=False, master_listen_fd=taken.detach()
        )
        for (size, _), taken in zip(groups, listeners, strict=True) if size
    ]  # fmt: skip
    ended = {}
    for _ in range(sum(map(len, processes))):
        pid, status = os.wait()
        ended[pid] = (os.waitstatus_to_exitcode(status), time.monotonic())
    del stores
    print(json.dumps([[ended[pid] for pid in group] for group in processes]))


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
