"""Keep the processes of one machine to cores of their own.

Two stages on two cores are slowed by a few percent when the kernel moves their threads about: caches
stay behind, and threads of one interpreter wait for each other across cores. So every process keeps
to its share, as under mpirun; its gloo threads, made later, inherit it.
"""

import os
from collections.abc import Sequence

from penstock.group.launch import available_cores


def keep_to_share(position: int, num_processes: int) -> int:
    """Bind this thread, and those that it starts from now on, to one process's share of the cores.

    Gives how many cores that are. Nothing is bound where the cores do not divide evenly, or where a
    quota decides instead.

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
    """Return one of several processes its share of the cores; all of them unless they divide evenly.

    >>> share([0, 1, 2, 3], position=1, num_processes=2)
    {2, 3}
    """
    each, rest = divmod(len(cores), num_processes)
    if rest or not each:
        return set(cores)
    return set(cores[position * each : (position + 1) * each])
