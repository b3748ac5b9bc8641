"""Fresh processes for tests: they meet through a file, have a deadline, and their tracebacks reach the reader."""

import contextlib
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from tests.warm import started_by

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"  # what tests run in processes of its own
# how many times longer processes may take; scripts/aarch64.sh sets it
GLOO = "[Gloo] Rank"  # what torch 2.10 writes on standard output
PATIENCE = float(os.environ.get("TESTS_PATIENCE", "1"))


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Ended:
    """How a process of a group ended: its status (minus the signal that killed it), and when."""

    status: int
    at_s: float


class Running:
    """A process with a deadline; leaving the block kills it and everything it started."""

    def __init__(
        self, command: Sequence[str], *, deadline_s: float, stdin: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        environment |= {
            "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", "PENSTOCK_PROGRESS": "0", **(env or {}),
        }  # fmt: skip
        self._deadline = time.monotonic() + PATIENCE * deadline_s
        self._stdin = stdin
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._known: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def children(self) -> list[psutil.Process]:
        """Every process that it or its children started and that still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._known |= set(psutil.Process(self.pid).children(recursive=True))
        for pid in started_by(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                forked = psutil.Process(pid)
                self._known |= {forked, *forked.children(recursive=True)}
        return [child for child in self._known if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def line(self) -> str:
        """Wait for a line of its output."""
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()).startswith(GLOO):
            pass
        return line.strip()

    def has_ended(self) -> bool:
        """Return whether it has ended by itself, or was killed."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it alone, and see what its children do."""
        self.children()
        self._process.kill()

    def wait(self) -> Finished:
        """Wait for its end; at the deadline it is killed and the test fails with what it wrote."""
        try:
            out, err = self._process.communicate(self._stdin, timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill_all()
            out, err = self._process.communicate()
            raise AssertionError(f"{self._process.args!r} is over its deadline\n{out}\n{err}") from None
        out = "".join(line for line in out.splitlines(keepends=True) if not line.startswith(GLOO))
        return Finished(self._process.returncode, out, err)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        with contextlib.suppress(ValueError):
            self._process.communicate()

    def _kill_all(self) -> None:
        for process in [*self.children(), self._process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def free_port() -> int:
    """Give a port of loopback that nobody listens at, below those that the system gives to outgoing connections.

    One of those may be taken by any connection before the test listens there.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(10_000, lowest)) if lowest > 11_000 else 0
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return int(free.getsockname()[1])


def lay_trap(folder: Path) -> Path:
    """Put modules into a folder that leave a mark when they are imported in place of the real ones."""
    mark = folder / "mark"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("torch", "numpy", "msgspec", "json"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')\n")
    return mark


def run_python(*arguments: str, deadline_s: float, stdin: str = "", env: Mapping[str, str] | None = None) -> Finished:
    """Run `python ARGUMENTS` to its end."""
    with Running([sys.executable, *arguments], deadline_s=deadline_s, stdin=stdin, env=env) as running:
        return running.wait()


def run_groups(script: Path, groups: Sequence[tuple[int, Sequence[str]]], deadline_s: float) -> list[list[Ended]]:
    """Run groups of a script's processes at once, each `(num_processes, arguments)`; 0 is one without torchrun.

    Gives how the processes of each group ended. A process that fails without being killed fails the test with what
    it wrote. What torchrun would set in their environment is set; that torchrun itself starts the script is for one
    test to show.
    """
    # each serves its group for as long as it is held
    stores = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in groups]
    with contextlib.ExitStack() as stack:
        running = []
        for (size, arguments), store in zip(groups, stores, strict=True):
            environments = [dict[str, str]()] if not size else _as_torchrun(size, store.port)
            command = [sys.executable, str(script), *arguments]
            running.append(
                [stack.enter_context(Running(command, deadline_s=deadline_s, env=env)) for env in environments]
            )
        everybody = [process for group in running for process in group]
        with ThreadPoolExecutor(len(everybody)) as pool:
            ended = dict(zip(everybody, pool.map(_end_of, everybody), strict=True))
    failed = "\n".join(finished.stderr for finished, _ in ended.values())
    assert all(end.status <= 0 for _, end in ended.values()), failed
    return [[ended[process][1] for process in group] for group in running]


def _end_of(running: Running) -> tuple[Finished, Ended]:
    finished = running.wait()
    return finished, Ended(finished.status, time.monotonic())


def _as_torchrun(size: int, port: int) -> list[dict[str, str]]:
    """Return what torchrun would set for each process of a group whose store is at a port."""
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return [meeting | {"RANK": str(rank)} for rank in range(size)]


def run_ranks(
    function: Callable[..., Any], num_ranks: int, deadline_s: float, folder: Path, *arguments: Any
) -> list[Any]:
    """Call `function(rank, store, *arguments)` in so many fresh processes; gives what each returned, as JSON can.

    The function is at the top of a test file; `store` is a FileStore in `folder`. A rank that raises
    fails the test with its traceback.
    """
    file, name = function.__code__.co_filename, function.__name__
    folder.mkdir(parents=True, exist_ok=True)
    calls = [json.dumps([file, name, rank, num_ranks, str(folder), list(arguments)]) for rank in range(num_ranks)]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Running([sys.executable, str(TESTS / "processes.py"), call], deadline_s=deadline_s))
            for call in calls
        ]
        finished = [rank.wait() for rank in ranks]
    failed = [f"rank {rank}:\n{end.stderr}" for rank, end in enumerate(finished) if end.status]
    assert not failed, "\n".join(failed)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def _be_rank(file: str, name: str, rank: int, num_ranks: int, folder: str, arguments: list[Any]) -> int:
    try:
        spec = importlib.util.spec_from_file_location("rank_code", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        store = FileStore(f"{folder}/store", num_ranks)
        result = getattr(module, name)(rank, store, *arguments)
        Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_be_rank(*json.loads(sys.argv[1])))
