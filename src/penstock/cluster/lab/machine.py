"""The parts of this machine that a lab uses, in one object that tests can replace."""

import contextlib
import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.cluster.lab.cgroups import Cgroups, CgroupsV1, CgroupsV2
from penstock.cluster.lab.network import Shell, SystemShell
from penstock.errors import ClusterError

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "taskset": "util-linux", "chrt": "util-linux"}
_LOCK_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The programs, cgroups and directories that labs use, and the machine's resources."""

    shell: Shell
    cgroups: Cgroups
    run_directory: Path = Path("/run/penstock")
    netns_directory: Path = Path("/etc/netns")
    num_cores: int
    memory_bytes: int

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for building or removing labs.

        Raises `ClusterError` if another process holds the lock for too long.
        """
        self.run_directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_DEADLINE_S
        with (self.run_directory / "lock").open("w") as file:
            # inherited by the commands run under the lock, see SystemShell
            os.set_inheritable(file.fileno(), True)
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ClusterError(
                            "only one lab is built or removed at a time; another process has held the lock for "
                            f"{_LOCK_DEADLINE_S:g} s; wait for it or end it"
                        ) from None
                    time.sleep(0.05)
            yield


def this_machine() -> Machine:
    """Detect this machine's programs, cgroups and resources.

    Raises `ClusterError` if it cannot run a lab: no root access, or a program or controller is missing.
    """
    if platform.system() != "Linux":
        raise ClusterError(f"a lab needs Linux, but this is {platform.system()}; run it on a Linux machine")
    if os.geteuid() != 0:
        raise ClusterError(f"a lab needs root for namespaces and cgroups; got user {os.geteuid()}; run it with sudo")
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise ClusterError(f"a lab needs the program {program}, which was not found; install {package}")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(shell=SystemShell(), cgroups=find_cgroups(), num_cores=num_cores(), memory_bytes=memory_bytes)


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups:
    """Detect this machine's cgroups and where those of a lab are created.

    Raises `ClusterError` unless both CPU and memory can be limited.
    """
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        own = dict(_own_cgroups((proc / "cgroup").read_text()))
    except OSError as error:
        raise ClusterError(f"a lab needs Linux with cgroups ({error.strerror}: {error.filename})") from None
    v1: dict[str, tuple[Path, str]] = {}
    v2: tuple[Path, str] | None = None
    for line in mounts:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        shown, where = left.split()[3:5]
        if kind == "cgroup":
            v1 |= {option: (Path(where), shown) for option in options.split()[-1].split(",")}
        elif kind == "cgroup2":
            v2 = (Path(where), shown)
    if "cpu" in v1 and "memory" in v1:
        bases = [_under(*v1[controller], own.get(controller, "/")) for controller in ("cpu", "memory")]
        return CgroupsV1(v1["cpu"][0], v1["memory"][0], *bases)
    if v2 is not None and {"cpu", "memory"} <= set(_words(v2[0] / "cgroup.controllers")):
        return CgroupsV2(v2[0], _handing_out(v2[0], _under(*v2, own.get("", "/"))))
    raise ClusterError(
        "a lab needs the cgroup controllers cpu and memory, which are not both mounted; mount -t cgroup2 none "
        "/sys/fs/cgroup, or boot with cgroup_enable=memory"
    )


def _own_cgroups(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _under(mount: Path, shown: str, own: str) -> Path:
    """Return the path of a cgroup below a mount that shows the tree from `shown` on; if it is not there, the mount."""
    part = Path(own)
    path = mount / (part.relative_to(shown) if part.is_relative_to(shown) else "")
    return path if path.is_dir() else mount


def _handing_out(root: Path, own: Path) -> Path:
    """Return the nearest cgroup, at or above this process's own, that delegates both controllers to its children."""
    for path in (own, *own.parents):
        if path == root or {"cpu", "memory"} <= set(_words(path / "cgroup.subtree_control")):
            return path
    return root


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
