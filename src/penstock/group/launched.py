"""Environment variables of a run; importable without torch. The launcher's are those of torchrun, Slurm or MPI."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import UsageError

KEY = "PENSTOCK_KEY"  # the path of the run's key
JOIN = "PENSTOCK_JOIN"  # the host and port of the training run that this process joins
TRUSTED = "PENSTOCK_TRUSTED"  # the network is trusted: no note about a run without a key
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# rank, size, and both on the own machine
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


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


_FIRST_PORT, _PORTS = 20_000, 20_000
_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")


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
