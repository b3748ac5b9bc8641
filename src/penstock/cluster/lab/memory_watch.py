"""Memory usage of a host's processes, to explain why a host ran out of memory."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.cluster.lab.cgroups import MemoryUse
from penstock.units import format_bytes

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
