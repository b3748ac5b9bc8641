"""Start worker processes on this machine and end them again."""

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
from penstock.group.addresses import BIND, remove_left

# torch's own lines about broken connections, with C++ frames: what they mean is said by whoever explains the loss
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_KILLED_S = 10.0  # in which a process that was killed ends
# the folder that the package lies in
_SOURCE = Path(__file__).resolve().parents[2]


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours, which must not import what lies in the current folder by chance.

    `python -m` would look there first, so that a `torch.py` among downloaded files would run.

    >>> module_command("penstock", "demo")[-2:]
    ['penstock', 'demo']
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def code_command(code: str) -> list[str]:
    """Return the command that runs a piece of code of ours, without the current folder as `module_command`."""
    return [sys.executable, "-P", "-c", code]


def module_path(module: str = "penstock") -> str:
    """Return where a fresh process that runs a module of ours looks for others, for its `PYTHONPATH`.

    An installed package is found anyway; one on `sys.path` alone, as for a notebook beside the source, is not. The
    current folder is left out unless the module or Penstock itself lies there.
    """
    here = Path.cwd().resolve()
    needed = here in (_SOURCE, *_folders_of(module))
    return os.pathsep.join(path or str(here) for path in sys.path if needed or Path(path).resolve() != here)


def _folders_of(module: str) -> list[Path]:
    """Find the folders on the path that a module's outermost package lies in."""
    found = find_spec(module.partition(".")[0])
    if found is None:
        return []
    places = found.submodule_search_locations or [found.origin or ""]
    return [Path(place).resolve().parent for place in places]


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker that ended although nobody asked it to."""

    index: int
    status: int

    def __str__(self) -> str:
        if self.status < 0:
            return f"was killed by signal {-self.status}" + (" (out of memory?)" if self.status == -9 else "")
        return f"ended with status {self.status}"


def leave_with_parent(grace_s: float = 0.0) -> None:
    """In a worker: end this process when the one that started it is gone, however it went.

    `grace_s` is how long a clean end may take that came before the parent's.
    """

    def watch() -> None:
        # not through the file object, whose lock the interpreter's own end would want
        while os.read(sys.stdin.fileno(), 1):
            pass
        remove_left(os.environ.get(BIND, ""))
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-parent", daemon=True).start()


class LocalWorkers:
    """Fresh Python processes that run a module; they end when this process does, however it ends.

    Each holds the read end of a pipe on its standard input: when the last writer is gone it reads the
    end of the file and leaves (`leave_with_parent`). They stand in a process group of their own, so that Ctrl-C reaches
    only the process that feeds, which then ends them in order.

    Example:
        workers = LocalWorkers("penstock.deploy.worker", [["--rank", "1"]])
    """

    def __init__(self, module: str, arguments: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> None:
        environment = {**QUIET, **os.environ, **(env or {}), "PYTHONPATH": module_path(module)}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for extra in arguments:
                command = module_command(module, *extra)
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

    def exits(self) -> list[WorkerExit]:
        """Return every worker that has ended."""
        found = [(index, process.poll()) for index, process in enumerate(self._processes)]
        return [WorkerExit(index, status) for index, status in found if status is not None]

    def exited(self) -> WorkerExit | None:
        """Return the first worker that has ended, or None while all are running."""
        return next(iter(self.exits()), None)

    def stop(self, grace_s: float) -> None:
        """Wait for the workers to end by themselves, then end those that have not.

        One that not even that ends, as it waits in the kernel, is named in a warning and left behind.
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
                f"a killed process ends within {_KILLED_S:g} s, but worker process {stuck} did not; see what it waits "
                "for with ps -o pid,stat,wchan,args, as for a disk that does not answer",
                stacklevel=2,
            )


def _running(processes: Sequence["subprocess.Popen[bytes]"], timeout_s: float) -> list["subprocess.Popen[bytes]"]:
    """Wait for processes to end, and return those that have not in time."""
    deadline, running = time.monotonic() + timeout_s, []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.append(process)
    return running
