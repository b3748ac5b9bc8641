"""The memory of processes and of this machine, as the system tells it."""

import contextlib
import os
import resource
import sys
from pathlib import Path

from penstock.errors import OutOfMemory

_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes(pid: int | None = None) -> int | None:
    """Return the memory that a process holds now, this one where none is named; None where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Return the most memory that this process has held at once."""
    own = _kilobytes("/proc/self/status", "VmHWM")
    if own is not None:
        return own
    # on Linux this one begins at the peak of who started the process, so it serves where there is no /proc
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def anonymous_bytes(process: int | str = "self") -> int | None:
    """Return the bytes of a process that no file stands behind: what it holds itself, without programs and libraries.

    None on systems that do not say, and for a process that has ended.
    """
    return _kilobytes(f"/proc/{process}/status", "RssAnon")


def available_bytes() -> int | None:
    """Return the memory that is free on this machine; None where the system does not say."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def allowed_bytes() -> int:
    """Return the most that this process may still take: what is free on this machine, or less where a cgroup says so.

    What comes from outside and asks for more than this is refused before anything is allocated.
    """
    limit = limit_bytes()
    left = None if limit is None else max(0, limit - (resident_bytes() or 0))
    known = [number for number in (available_bytes(), left) if number is not None]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit_bytes() -> int | None:
    """Return the most memory that this process may hold: this machine's, or less where a cgroup says so."""
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
    except (OSError, ValueError):  # also "max", which is none
        return None


def num_killed() -> int | None:
    """Count the processes that the system has ended for want of memory since it started; None where it does not say.

    Those that came to the limit of their own group (cgroup) count too.
    """
    try:
        rows = dict(line.split() for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
        return int(rows["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one behind it, is that memory could not be had.

    torch has a kind of its own for GPUs; of its CPU allocator the words are the only sign.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    # an error may be its own cause, where the reason found behind it is itself
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
