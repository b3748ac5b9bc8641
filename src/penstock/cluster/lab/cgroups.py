"""CPU quotas and memory limits of a lab's hosts, with both versions of the kernel's cgroups.

A host is a directory `penstock.LAB/HOST`: one in version 2, one per controller in version 1. These directories are
found by name anywhere in the tree, so a lab can be stopped from any process.
"""

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from penstock.errors import ClusterError, RunError
from penstock.units import format_bytes

# short, so that a host with a small share runs slowly instead of alternating between full speed and pauses
_PERIOD_US = 10_000
# the smallest quota that the kernel accepts
_MIN_QUOTA_US = 1_000
# hosts have priority, because a real board does not wait for this machine's processes; those get the CPU time that the
# quotas do not cover
_MOST_SHARES = 2**18
_MOST_WEIGHT = 10_000
_DEADLINE_S = 10.0


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Readings of a host's memory cgroup: bytes in use, their peak, and the number of killed processes."""

    used_bytes: int
    peak_bytes: int
    num_oom_kills: int


def quota(cpu: float) -> tuple[int, int]:
    """Convert a share of a core to a quota and a period in microseconds.

    >>> quota(0.35), quota(0.05)
    ((3500, 10000), (1000, 20000))
    """
    period_us = max(_PERIOD_US, round(_MIN_QUOTA_US / cpu))
    return max(_MIN_QUOTA_US, round(cpu * period_us)), period_us


class Cgroups(ABC):
    """The cgroups of labs, anywhere under the roots for CPU and for memory."""

    # files with a host's memory in use, its peak, and its out-of-memory kills
    _used: str
    _peak: str
    _events: str

    def __init__(self, cpu_root: Path, memory_root: Path) -> None:
        self.cpu_root, self.memory_root = cpu_root, memory_root
        self._known: dict[tuple[Path, str, str], Path] = {}

    @abstractmethod
    def create(self, lab: str, host: str, cpu: float, memory_bytes: int) -> None:
        """Make a host's cgroup with its limits; raises `ClusterError` if the kernel refuses."""

    @abstractmethod
    def cpu(self, lab: str, host: str) -> float:
        """Read a host's share of a core."""

    @abstractmethod
    def _write_cpu(self, path: Path, cpu: float) -> None: ...

    def set_cpu(self, lab: str, host: str, cpu: float) -> None:
        """Change a host's share of a core."""
        self._write_cpu(self._one(self.cpu_root, lab, host), cpu)

    def memory(self, lab: str, host: str) -> MemoryUse:
        """Read a host's memory usage; without `memory.peak` (before Linux 5.19), the peak is the current usage."""
        path = self._one(self.memory_root, lab, host)
        used_bytes, peak = _read_int(path / self._used), path / self._peak
        peak_bytes = _read_int(peak) if peak.exists() else used_bytes
        return MemoryUse(used_bytes=used_bytes, peak_bytes=peak_bytes, num_oom_kills=self.oom_kills(lab, host))

    def oom_kills(self, lab: str, host: str) -> int:
        """Count the processes that the kernel ended on a host because memory ran out."""
        return _read_table(self._one(self.memory_root, lab, host) / self._events).get("oom_kill", 0)

    def directories(self, lab: str, host: str | None = None) -> list[Path]:
        """Find the existing directories of a lab, or of one of its hosts."""
        found = [
            Path(path) / _lab_directory(lab)
            for root in dict.fromkeys((self.cpu_root, self.memory_root))
            for path, children, _ in os.walk(root)
            if _lab_directory(lab) in children
        ]
        if host is None:
            return found
        return [path / host for path in found if (path / host).is_dir()]

    def processes(self, lab: str, host: str | None = None) -> set[int]:
        """Return the ids of the processes of a host, or of the whole lab."""
        return processes_in(self.directories(lab, host))

    def kill(self, lab: str, host: str | None = None) -> None:
        """Kill every process of a host, or of the whole lab, immediately.

        Raises `RunError` if a process cannot be killed.
        """
        kill_processes(self.directories(lab, host))

    def remove(self, lab: str) -> None:
        """Remove all cgroups of a lab, and kill processes that still join them; no error if none exist.

        Raises `RunError` if a cgroup cannot be removed.
        """
        for directory in self.directories(lab):
            for path, _, _ in os.walk(directory, topdown=False):
                _remove(Path(path))

    def _one(self, root: Path, lab: str, host: str) -> Path:
        known = self._known.get((root, lab, host))
        if known is not None and known.is_dir():
            return known
        for path in self.directories(lab, host):
            if path.is_relative_to(root):
                self._known[root, lab, host] = path
                return path
        raise ClusterError(f"host {host} of lab {lab} is not up; run penstock lab up first")


class CgroupsV1(Cgroups):
    """Version 1: one tree for CPU, one for memory.

    Hosts are below the caller's own cgroup, so that a lab never gets more resources than its caller.
    """

    _used, _peak, _events = "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"

    def __init__(self, cpu_root: Path, memory_root: Path, cpu_base: Path, memory_base: Path) -> None:
        super().__init__(cpu_root, memory_root)
        self.cpu_base, self.memory_base = cpu_base, memory_base

    def create(self, lab: str, host: str, cpu: float, memory_bytes: int) -> None:
        """Make a host's two cgroups; swap is off if the kernel counts it."""
        cpu_path = self.cpu_base / _lab_directory(lab) / host
        memory_path = self.memory_base / _lab_directory(lab) / host
        for path in (cpu_path, memory_path):
            _make(path)
        _write(cpu_path.parent / "cpu.shares", _MOST_SHARES)
        self._write_cpu(cpu_path, cpu)
        _write(memory_path / "memory.limit_in_bytes", memory_bytes)
        for file, value in (("memory.memsw.limit_in_bytes", memory_bytes), ("memory.swappiness", 0)):
            with contextlib.suppress(ClusterError):
                _write(memory_path / file, value)

    def cpu(self, lab: str, host: str) -> float:
        """Read a host's share of a core."""
        path = self._one(self.cpu_root, lab, host)
        return _read_int(path / "cpu.cfs_quota_us") / _read_int(path / "cpu.cfs_period_us")

    def _write_cpu(self, path: Path, cpu: float) -> None:
        quota_us, period_us = quota(cpu)
        # lift the quota first: the kernel may not allow the old quota with the new period
        _write(path / "cpu.cfs_quota_us", -1)
        _write(path / "cpu.cfs_period_us", period_us)
        _write(path / "cpu.cfs_quota_us", quota_us)


class CgroupsV2(Cgroups):
    """Version 2: one tree. Hosts are below `base`, which must be able to delegate controllers."""

    _used, _peak, _events = "memory.current", "memory.peak", "memory.events"

    def __init__(self, root: Path, base: Path) -> None:
        super().__init__(root, root)
        self.base = base

    def create(self, lab: str, host: str, cpu: float, memory_bytes: int) -> None:
        """Make a host's cgroup; swap is off if the kernel counts it."""
        directory = self.base / _lab_directory(lab)
        _make(directory)
        for parent in (self.base, directory):
            _write(parent / "cgroup.subtree_control", "+cpu +memory")
        _write(directory / "cpu.weight", _MOST_WEIGHT)
        path = directory / host
        _make(path)
        self._write_cpu(path, cpu)
        _write(path / "memory.max", memory_bytes)
        with contextlib.suppress(ClusterError):
            _write(path / "memory.swap.max", 0)

    def cpu(self, lab: str, host: str) -> float:
        """Read a host's share of a core."""
        quota_us, period_us = (self._one(self.cpu_root, lab, host) / "cpu.max").read_text().split()
        return int(quota_us) / int(period_us)

    def _write_cpu(self, path: Path, cpu: float) -> None:
        quota_us, period_us = quota(cpu)
        _write(path / "cpu.max", f"{quota_us} {period_us}")


def kill_processes(directories: Sequence[Path]) -> None:
    """Kill every process in these cgroups immediately; raises `RunError` if a process cannot be killed."""
    deadline = time.monotonic() + _DEADLINE_S
    while pids := processes_in(directories):
        if time.monotonic() > deadline:
            raise RunError(
                f"killed processes must exit within {_DEADLINE_S:g} s; {sorted(pids)} did not; find what they wait "
                "for with ps -o pid,stat,wchan,args, then run penstock lab down again"
            )
        _kill_once(pids)
        time.sleep(0.01)


def _lab_directory(lab: str) -> str:
    return f"penstock.{lab}"


def processes_in(directories: Iterable[Path]) -> set[int]:
    """Return the ids of the processes in these cgroups and those below them."""
    pids: set[int] = set()
    for directory in directories:
        for path, _, _ in os.walk(directory):
            with contextlib.suppress(OSError):
                pids.update(int(word) for word in (Path(path) / "cgroup.procs").read_text().split())
    # 0 stands for a process of another pid namespace, whose id is not visible here
    return pids - {0}


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"a lab needs to make cgroups, but {path} cannot be made ({error.strerror}); "
            "run it as root and outside of containers"
        ) from None


def _remove(path: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            # a killed process keeps its cgroup for a moment, and a process that was just being started may have joined
            # meanwhile
            if time.monotonic() > deadline:
                raise RunError(
                    f"a lab's cgroup must be removable, but {path} is not ({error.strerror}); "
                    "end what runs in it and run penstock lab down again"
                ) from None
            _kill_once(processes_in([path]))
            time.sleep(0.01)


def _kill_once(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _write(path: Path, value: int | str) -> None:
    try:
        path.write_text(f"{value}\n")
    except OSError as error:
        raise ClusterError(
            f"the kernel must accept a lab's limits, but not {value} for {path} ({error.strerror}); "
            "change the host's cpu or memory, or run the lab outside of containers"
        ) from None


def _read_int(path: Path) -> int:
    return int(path.read_text())


def _read_table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2}


_SHOWN_PROCESSES = 3
_SHOWN_LETTERS = 60


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a host, and the peak of its sampled memory usage."""

    pid: int
    command: str
    peak_bytes: int


class MemoryWatch:
    """Samples of one host's processes, including those present when the host ran out of memory."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._seen: dict[int, ProcessMemory] = {}
        self._before: set[int] = set()
        self._now: set[int] = set()

    def sample(self, pids: Iterable[int]) -> None:
        """Sample the processes that are on the host now."""
        self._before, self._now = self._now, set(pids)
        for pid in self._now:
            now = read_process(pid, self._proc)
            if now is not None:
                before = self._seen.get(pid)
                peak_bytes = max(now.peak_bytes, before.peak_bytes if before else 0)
                self._seen[pid] = msgspec.structs.replace(now, peak_bytes=peak_bytes)

    def largest(self) -> list[ProcessMemory]:
        """Return the sampled processes, largest first."""
        return sorted(self._seen.values(), key=lambda process: -process.peak_bytes)

    def ended(self) -> ProcessMemory | None:
        """Return the largest recent process, because the kernel kills the largest first."""
        lately = self._before | self._now
        return next((process for process in self.largest() if process.pid in lately), None)


def read_process(pid: int, proc: Path = Path("/proc")) -> ProcessMemory | None:
    """Read the command and peak memory of a process; None after its exit."""
    try:
        status = (proc / str(pid) / "status").read_text()
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    rows = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmHWM" not in rows:
        return None
    command = " ".join(" ".join(words).split())
    if len(command) > _SHOWN_LETTERS:
        command = command[: _SHOWN_LETTERS - 1] + "…"
    peak_bytes = int(rows["VmHWM"].split()[0]) * 1024
    return ProcessMemory(pid=pid, command=command or rows["Name"].strip(), peak_bytes=peak_bytes)


def explain(host: str, limit_bytes: int, use: MemoryUse, watch: MemoryWatch) -> str:
    """Explain in one line which host ran out of memory, at which limit, and which processes used the memory."""
    ended = watch.ended()
    victim = f"ended its largest process, {ended.command!r}" if ended else "ended a process"
    shown = ", ".join(
        f"{process.command!r} {format_bytes(process.peak_bytes)}" for process in watch.largest()[:_SHOWN_PROCESSES]
    )
    return (
        f"{host} ran out of its memory of {format_bytes(limit_bytes)}, so the kernel {victim}; "
        f"the host's peak was {format_bytes(use.peak_bytes)}, the largest seen were "
        f"{shown or 'too short-lived to be seen'}; "
        "give the host more with memory = … in the lab file, or less to do"
    )
