"""The cores and the memory that processes use and may use, as reported by the system."""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import OutOfMemory, RunError

_CGROUPS = Path("/sys/fs/cgroup")
_ADDRESSES = 2 * 2**30  # for threads, models and data, in addition to libraries
_ARENA_MAX = -8  # an option of glibc's mallopt


def resident_bytes(pid: int | None = None) -> int | None:
    """Return the resident memory of a process, by default this one; None if the system does not report it."""
    try:
        pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    own = _kilobytes("/proc/self/status", "VmHWM")
    if own is not None:
        return own
    # on Linux `ru_maxrss` starts at the parent's peak, so it is used only without /proc
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def anonymous_bytes(process: int | str = "self") -> int | None:
    """Return the anonymous memory of a process in bytes, which excludes programs and libraries.

    None on systems that do not report it, and for a process that has exited.
    """
    return _kilobytes(f"/proc/{process}/status", "RssAnon")


def available_bytes() -> int | None:
    """Return the available memory of this machine; None if the system does not report it."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def allowed_bytes() -> int:
    """Return the memory that this process may still allocate: the machine's available memory, or less under a cgroup
    limit.

    External requests for more than this are rejected before any allocation.
    """
    limit = limit_bytes()
    left = None if limit is None else max(0, limit - (resident_bytes() or 0))
    known = [number for number in (available_bytes(), left) if number is not None]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_addresses() -> None:
    """Raise `RunError` if the limit on addresses (`ulimit -v`) is too low for torch, which would abort the process."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        import torch  # noqa: F401 -- it maps gigabytes

        taken = _kilobytes("/proc/self/status", "VmSize") or 0
    except (ImportError, OSError, MemoryError, RuntimeError):
        taken = limit
    if taken + _ADDRESSES > limit:
        raise RunError(
            f"this process may have {limit / 2**30:.1f} GiB of addresses (ulimit -v), and torch needs at "
            f"least {(taken + _ADDRESSES) / 2**30:.1f} GiB, mostly without memory; set ulimit -v unlimited, "
            "and limit memory by a cgroup"
        )


def release_freed() -> None:
    """Return freed memory to the system; glibc keeps that of each thread, which may have decoded a large image."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def share_arena() -> None:
    """Let all threads of this process allocate from one of glibc's arenas, so that each uses what others freed.

    Call it first in a process that runs stages; `MALLOC_ARENA_MAX` in the environment takes precedence.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def limit_bytes() -> int | None:
    """Return the memory limit of this process: this machine's memory, or less under a cgroup limit."""
    limits = [_kilobytes("/proc/meminfo", "MemTotal")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits.append(_number(_CGROUPS / path.strip("/") / "memory.max"))
            elif "memory" in controllers.split(","):
                limits.append(_number(_CGROUPS / controllers / path.strip("/") / "memory.limit_in_bytes"))
    return min((limit for limit in limits if limit is not None), default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # also "max": no limit
        return None


def num_killed() -> int | None:
    """Return the number of processes killed by the system for lack of memory since boot; None if not reported.

    Processes killed at the limit of their own cgroup count too.
    """
    try:
        rows = dict(line.split() for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
        return int(rows["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, is a failed allocation of memory.

    torch has an exception type for GPUs; its CPU allocator is recognized only by the message.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    # an error may be its own cause, if the reason found for it is itself
    while cause is not None and cause not in seen:
        if isinstance(cause, MemoryError | OutOfMemory) or type(cause).__name__ == "OutOfMemoryError":
            return True
        if isinstance(cause, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(cause):
            return True
        seen.append(cause)
        cause = cause.__cause__
    return False


def _kilobytes(path: str, field: str) -> int | None:
    try:
        lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return None


def usable_cpus() -> float:
    """Return the number of CPUs that this process may use, a fraction under a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(cores), cpu_quota() or float(cores))


def available_cores() -> int:
    """Return the whole cores that this process may use, at least one."""
    return max(1, int(usable_cpus()))


def processor_features() -> frozenset[str]:
    """Return the processor's features by their Linux names (`avx2`, `avx512_vnni`, `bf16`), empty if unknown.

    >>> "" in processor_features()
    False
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()[2:])


def cpu_quota() -> float | None:
    """Return the cores set by PENSTOCK_CPU or the cgroup's quota, the smaller of both; None without either."""
    told = [float(os.environ["PENSTOCK_CPU"])] if "PENSTOCK_CPU" in os.environ else []
    left = quota_cores()
    return min([*told, *([left] if left is not None else [])], default=None)


def quota_cores(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the smallest CPU quota of this process's cgroup and its ancestors, in cores; None without any.

    Reads version 1 (`cpu.cfs_quota_us`) and version 2 (`cpu.max`).
    """
    quotas: list[float] = []
    with contextlib.suppress(OSError):
        for line in process.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            for mount in (root,) if not controllers else (root / "cpu", root / controllers):
                place = mount / path.strip("/")
                quotas += [q for at in (place, *place.parents) if at.is_relative_to(mount) and (q := _quota(at))]
    return min(quotas, default=None)


def _quota(cgroup: Path) -> float | None:
    """Read one cgroup's own quota, in cores."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit = (cgroup / "cpu.cfs_quota_us").read_text()
        return int(limit) / int((cgroup / "cpu.cfs_period_us").read_text()) if int(limit) > 0 else None
    return None


def keep_to_share(position: int, num_processes: int) -> int:
    """Bind this thread, and those that it starts from now on, to one process's share of the cores.

    Returns the number of these cores. Nothing is bound if the cores do not divide evenly, or under a quota.

    Example:
        keep_to_share(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    """
    num_cores = available_cores()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) == num_cores:
            os.sched_setaffinity(0, share(cores, position, num_processes))
    return max(1, num_cores // num_processes)


def share(cores: Sequence[int], position: int, num_processes: int) -> set[int]:
    """Return the share of the cores for one of several processes; all cores unless they divide evenly.

    >>> share([0, 1, 2, 3], position=1, num_processes=2)
    {2, 3}
    """
    each, rest = divmod(len(cores), num_processes)
    if rest or not each:
        return set(cores)
    return set(cores[position * each : (position + 1) * each])
