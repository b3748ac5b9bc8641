"""Environment variables of a run; importable without torch. The launcher's are those of torchrun, Slurm or MPI."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import UsageError
from penstock.group.slurm import slurm_variables

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
