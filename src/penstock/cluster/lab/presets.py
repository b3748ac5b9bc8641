"""Presets of small boards for `penstock lab init --like`.

A lab emulates a board's memory and network, not its processor: every host gets the same share of this machine's cores,
small enough that the hosts do not disturb each other.
"""

import math

from penstock.cluster.lab.spec import QUIET_SHARE, HostSpec, LabSpec
from penstock.errors import ClusterError
from penstock.text import nearest

_GIGABIT = 125_000_000.0
# name: memory and bandwidth of the wired network, in bytes per second
PRESETS: dict[str, tuple[int, float]] = {
    # BCM2837, 1 GB, 100 Mbit Ethernet over USB 2.0
    "raspberry-pi-3": (2**30, _GIGABIT / 10),
    # the same memory, with a gigabit port over USB 2.0, rated at 300 Mbit/s by its maker
    "raspberry-pi-3-plus": (2**30, _GIGABIT * 0.3),
    # sold with 1 to 8 GB; true gigabit Ethernet
    "raspberry-pi-4": (4 * 2**30, _GIGABIT),
    # sold with 1 to 16 GB; true gigabit Ethernet
    "raspberry-pi-5": (8 * 2**30, _GIGABIT),
}


def preset(
    like: str, num_hosts: int, num_cores: int, *, name: str = "lab", cpu: float | None = None,
    memory_bytes: int | None = None, bandwidth_bytes_per_s: float | None = None,
) -> LabSpec:  # fmt: skip
    """Make a lab of equal hosts from a known board; arguments that are given replace the board's values.

    Raises `ClusterError` for an unknown board or a value that cannot be emulated.

    >>> preset("raspberry-pi-4", 4, num_cores=2).hosts[3].cpu
    0.35
    """
    if like not in PRESETS:
        hint = nearest(like, PRESETS, 1, "; choose one of these")
        raise ClusterError(f"--like must be one of {', '.join(PRESETS)}; got {like!r}{hint}")
    if num_hosts < 1:
        raise ClusterError(f"a lab must have at least one host; got {num_hosts}; use --hosts 4")
    board_memory_bytes, board_rate = PRESETS[like]
    if cpu is None:  # with the usual single process per host, more than one core would be unused
        cpu = min(1.0, math.floor(QUIET_SHARE * num_cores / num_hosts * 100 + 1e-9) / 100)
    memory_bytes = board_memory_bytes if memory_bytes is None else memory_bytes
    bandwidth_bytes_per_s = board_rate if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
    hosts = tuple(
        HostSpec(name=f"host{index}", cpu=cpu, memory_bytes=memory_bytes, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        for index in range(num_hosts)
    )
    return LabSpec(name=name, hosts=hosts)
