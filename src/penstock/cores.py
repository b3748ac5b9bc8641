"""The cores that this process may use: by its affinity, the quota of its container or lab host, and its share."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


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
