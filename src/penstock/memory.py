"""The memory of processes and of this machine, as the system tells it."""

import os
import resource
import sys
from pathlib import Path


def resident_bytes(pid: int | None = None) -> int | None:
    """Give the memory that a process holds now, this one where none is named; None where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Give the most memory that this process has held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def anonymous_bytes() -> int | None:
    """Give the bytes of this process that no file stands behind: what it holds itself, without programs and libraries.

    None on systems that do not say.
    """
    return _kilobytes("/proc/self/status", "RssAnon")


def available_bytes() -> int | None:
    """Give the memory that is free on this machine; None where the system does not say."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _kilobytes(path: str, field: str) -> int | None:
    try:
        lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return None
