"""Start and stop worker processes on this machine."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock.errors import UsageError
from penstock.graph.operators import FROM as OPERATORS_FROM
from penstock.group.addresses import BIND, remove_left

# suppresses torch's log lines with C++ frames about broken connections: the group's verdict reports the lost process
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_KILLED_S = 10.0  # timeout for the exit of a killed process
# the folder that contains the package
_SOURCE = Path(__file__).resolve().parents[2]


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours without the current folder on its path.

    `python -m` would search that folder first, so that a `torch.py` among downloaded files would run.

    >>> module_command("penstock", "demo")[-2:]
    ['penstock', 'demo']
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def code_command(code: str) -> list[str]:
    """Return the command that runs code of ours, without the current folder on its path as in `module_command`."""
    return [sys.executable, "-P", "-c", code]


def module_path(module: str = "penstock") -> str:
    """Return the `PYTHONPATH` for a new process that runs a module of ours.

    A new process finds installed packages anyway. It does not find a package that this process finds only through its
    own `sys.path`; for example, a notebook in the folder of the source finds Penstock that way. The current folder is
    left out unless it contains the module or Penstock itself.
    """
    here = Path.cwd().resolve()
    needed = here in (_SOURCE, *_folders_of(module))
    return os.pathsep.join(path or str(here) for path in sys.path if needed or Path(path).resolve() != here)


def _folders_of(module: str) -> list[Path]:
    """Find the folders on the path that contain a module's top-level package."""
    found = find_spec(module.partition(".")[0])
    if found is None:
        return []
    places = found.submodule_search_locations or [found.origin or ""]
    return [Path(place).resolve().parent for place in places]


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """An unexpected exit of a worker."""

    index: int
    status: int

    def __str__(self) -> str:
        if self.status < 0:
            return f"was killed by signal {-self.status}" + (" (out of memory?)" if self.status == -9 else "")
        return f"ended with status {self.status}"


def leave_with_parent(grace_s: float = 0.0) -> None:
    """Exit this worker when its parent process exits, for any reason.

    `grace_s` is the time left for a clean exit that began before the parent exited.
    """

    def watch() -> None:
        # not through the file object, whose lock the interpreter needs at exit
        while os.read(sys.stdin.fileno(), 1):
            pass
        remove_left(os.environ.get(BIND, ""))
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-parent", daemon=True).start()


class LocalWorkers:
    """New Python processes that run a module; they exit when this process does, for any reason.

    The standard input of each worker is a pipe: once the last writer has exited, the worker reads end-of-file and exits
    (`leave_with_parent`). Each worker has a session of its own, so that Ctrl-C reaches only the driver, which then ends
    them cleanly.

    Example:
        workers = LocalWorkers("penstock.deploy.worker", [["--rank", "1"]])
    """

    def __init__(self, module: str, arguments: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> None:
        environment = {**QUIET, **os.environ, **(env or {}), "PYTHONPATH": module_path(module)}
        if os.environ.get(OPERATORS_FROM):  # the caller's own path may have the modules that it names
            environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for extra in arguments:
                command = module_command(module, *extra)
                self._processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
                )
        except OSError as error:
            self.stop(0.0)
            raise UsageError(f"cannot start a worker process: {error}") from error

    @property
    def pids(self) -> list[int]:
        """Process ids, in order."""
        return [process.pid for process in self._processes]

    def exits(self) -> list[WorkerExit]:
        """Return every worker that has exited."""
        found = [(index, process.poll()) for index, process in enumerate(self._processes)]
        return [WorkerExit(index, status) for index, status in found if status is not None]

    def exited(self) -> WorkerExit | None:
        """Return a worker that has exited, the one with the lowest index, or None while all are running."""
        return next(iter(self.exits()), None)

    def stop(self, grace_s: float) -> None:
        """Close the workers' standard input, which ends them, and kill those that still run after `grace_s` seconds.

        A worker that survives the kill, because it waits in the kernel, is named in a warning and abandoned.
        """
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        killed = _running(self._processes, grace_s)
        for process in killed:
            process.kill()  # also ends a stopped process
        stuck = ", ".join(str(process.pid) for process in _running(killed, _KILLED_S))
        self._processes = []
        if stuck:
            warnings.warn(
                f"a killed process must exit within {_KILLED_S:g} s, but worker process {stuck} did not; use ps -o "
                "pid,stat,wchan,args to see what it waits for, for example a disk that does not answer",
                stacklevel=2,
            )


def _running(processes: Sequence["subprocess.Popen[bytes]"], timeout_s: float) -> list["subprocess.Popen[bytes]"]:
    """Wait for processes to exit, and return those that have not by the timeout."""
    deadline, running = time.monotonic() + timeout_s, []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.append(process)
    return running
