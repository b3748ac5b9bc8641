"""Start worker processes on this machine and end them again."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker that ended although nobody asked it to."""

    index: int
    status: int

    def __str__(self) -> str:
        if self.status < 0:
            return f"was killed by signal {-self.status}" + (" (out of memory?)" if self.status == -9 else "")
        return f"ended with status {self.status}"


class LocalWorkers:
    """Fresh Python processes that run a module; they end when this process does, however it ends.

    Each holds the read end of a pipe on its standard input: when the last writer is gone it reads the
    end of the file and leaves. They stand in a process group of their own, so that Ctrl-C reaches
    only the process that feeds, which then ends them in order.

    Example:
        workers = LocalWorkers("penstock.engine.worker", [["--rank", "1"]])
    """

    def __init__(self, module: str, arguments: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> None:
        environment = {**os.environ, **(env or {})}
        # an installed package is found anyway; one on sys.path alone (a notebook beside the source) is not
        paths = [path for path in sys.path if path]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for extra in arguments:
                command = [sys.executable, "-m", module, *extra]
                self._processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
                )
        except OSError as error:
            self.stop(0.0)
            raise UsageError(f"a worker process could not be started: {error}") from error

    @property
    def pids(self) -> list[int]:
        """The process ids, in order."""
        return [process.pid for process in self._processes]

    def exited(self) -> WorkerExit | None:
        """Give the first worker that has ended, or None while all are running."""
        for index, process in enumerate(self._processes):
            status = process.poll()
            if status is not None:
                return WorkerExit(index, status)
        return None

    def stop(self, grace_s: float) -> None:
        """Wait for the workers to end by themselves, then end those that have not."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # also ends a stopped process
                process.wait()
        self._processes = []


def available_cores() -> int:
    """Count the cores that this process may use: its affinity, and a container's or lab host's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_cores()
    return max(1, min(affinity, int(quota) if quota else affinity))


def _quota_cores() -> float | None:
    for path, v2 in (("/sys/fs/cgroup/cpu.max", True), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", False)):
        with contextlib.suppress(OSError, ValueError):
            with open(path) as file:
                fields = file.read().split()
            if v2:
                return None if fields[0] == "max" else float(fields[0]) / float(fields[1])
            if int(fields[0]) > 0:
                with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as file:
                    return int(fields[0]) / int(file.read())
    return None
