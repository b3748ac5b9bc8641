"""Start of processes on this machine, and the environment variables that launchers give them."""

import contextlib
import os
import re
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
KEY = "PENSTOCK_KEY"  # the path of the run's key
JOIN = "PENSTOCK_JOIN"  # the host and port of the training run that this process joins
TRUSTED = "PENSTOCK_TRUSTED"  # the network is trusted: no note about a run without a key
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# rank, size, and both on the own machine
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_FIRST_PORT, _PORTS = 20_000, 20_000
_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")


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

    def stop(self, grace_s: float, *, killed_s: float = _KILLED_S) -> None:
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
        stuck = ", ".join(str(process.pid) for process in _running(killed, killed_s))
        self._processes = []
        if stuck:
            warnings.warn(
                f"a killed process must exit within {killed_s:g} s, but worker process {stuck} did not; use ps -o "
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


@dataclass(frozen=True, slots=True)
class Launched:
    """Rank of a process, the number of processes, and the address and port of the rendezvous."""

    rank: int
    size: int
    host: str
    port: int


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a process that Slurm or MPI started; empty for any other process.

    mpirun sets no address: MASTER_ADDR and MASTER_PORT are the user's.

    >>> launcher_variables({"PMI_RANK": "1", "PMI_SIZE": "2"})
    {'RANK': '1', 'WORLD_SIZE': '2'}
    """
    # Open MPI starts its daemons by srun, so its processes have Slurm's variables, too, with the daemon's rank
    return _of_mpi(environment, _OPEN_MPI) or slurm_variables(environment) or _of_mpi(environment, _MPICH)


def _of_mpi(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    given = [environment.get(name, "") for name in names]
    if not given[0].isdecimal() or not given[1].isdecimal() or int(given[1]) < 2:
        return {}
    found = dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), given, strict=True))
    return {name: value for name, value in found.items() if value}


def read_launched(environment: Mapping[str, str]) -> Launched | None:
    """Return what a launcher set, or None for a process without a launcher.

    >>> read_launched({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "pi1", "MASTER_PORT": "29500"}).port
    29500

    Raises `UsageError` for values that cannot be, and for several processes without a rendezvous: each would run alone.
    """
    absent = [name for name in _NAMES if name not in environment]
    if absent:
        if not absent[0].startswith("MASTER") or environment["WORLD_SIZE"] in ("", "0", "1"):
            return None
        raise UsageError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(absent)}; export the address of rank 0's machine and "
            "a free port (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500), or unset RANK and WORLD_SIZE"
        )
    size = _number(environment, "WORLD_SIZE", 1, 2**31)
    rank = _number(environment, "RANK", 0, size - 1)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in environment:
            _number(environment, name, 0, size)
    if not environment["MASTER_ADDR"].strip():
        raise UsageError("MASTER_ADDR must be the address of rank 0's machine; got ''")
    return Launched(rank, size, environment["MASTER_ADDR"], _number(environment, "MASTER_PORT", 1, 65535))


def _number(environment: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    text = environment[name].strip()
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        limit = f"{lowest} to {highest}" if highest < 2**31 else f"at least {lowest}"
        raise UsageError(
            f"{name} must be a number, {limit}; got {environment[name]!r}; set it, or unset all of {', '.join(_NAMES)}"
        )
    return int(text)


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on for a task of a step with several tasks; empty for any other process.

    A batch script is not a task of a step. MASTER_ADDR and MASTER_PORT are kept if set.

    >>> slurm_variables({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    ...                  "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "pi[07-08]", "SLURM_JOB_ID": "5"})
    {'RANK': '2', 'WORLD_SIZE': '4', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': 'pi07', \
'MASTER_PORT': '20005'}
    """
    try:
        size, rank = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment["SLURM_PROCID"])
        if size < 2:
            return {}
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
        tasks = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        found = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(int(environment["SLURM_LOCALID"])),
            "LOCAL_WORLD_SIZE": str(tasks[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": first_node(environment["SLURM_STEP_NODELIST"]),
            # jobs that share a node usually meet at different ports
            "MASTER_PORT": str(_FIRST_PORT + (job + 97 * step) % _PORTS),
        }
    except (KeyError, ValueError, IndexError):
        return {}
    return found | {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}


def tasks_per_node(text: str) -> list[int]:
    """Parse the number of tasks on each node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Raises `ValueError` for anything else.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(f"tasks per node must be as in 2(x3),1; got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_node(nodes: str) -> str:
    """Return the first node of a Slurm node list.

    >>> first_node("pi[07-09,12],desk"), first_node("desk,pi3"), first_node("a[1-2]b[5-6]")
    ('pi07', 'desk', 'a1b5')
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
