"""A long stream on hosts that are reached by ssh, and what is done to it: faults that come and go, rows counted."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Protocol

import msgspec

from benchmarks.ssh_hosts import SshLab
from penstock.cli.cluster import commands_by_ssh
from penstock.cluster.lab import Lab
from penstock.cluster.output import OutputLine
from penstock.cluster.ssh.remote import RemoteRun
from penstock.errors import ClusterError
from penstock.spec.cluster import read_cluster

KINDS = ("kill", "cut", "freeze", "slow", "memory")
_PORT = 29500
_LOOK_S = 0.02
_WATCHED_S = 20.0  # after a fault: no result for longer is no gap but a hang
# a fault shows after this at the latest; what is slow is slow for as long, so that it can be noticed
_WATCHED_AT_LEAST_S = {"kill": 3.0, "cut": 7.0, "freeze": 7.0, "slow": 12.0, "memory": 3.0}
_QUIET_S = 1.5  # results have come without a pause for so long: it is over
_SLOWED = 3.0

# takes most of a host's memory; the kernel makes room by ending the process that computes, which is put first in line
_HOG = "import sys; held = [b'x' * 2**22 for _ in range(int(sys.argv[1]) // 2**22)]"
_HOG_PART = 0.95
_GOES_ON_WITH = re.compile(r"continues on (\d+) process")  # a training
_GOES_ON = re.compile(r"continuing on ([\w, .:-]+) after")


@dataclass
class Fault:
    """What happened to a host, when, and what came of it."""

    kind: str
    hosts: tuple[str, ...]
    at_result: int
    phase: str
    gap_s: float = 0.0  # the longest time without a result from the fault on
    hung: bool = False


class Started(contextlib.AbstractContextManager["Started"], Protocol):
    """A command on some hosts, which is ended with its block."""

    @property
    def exit_codes(self) -> Mapping[str, int | None]:
        """How each host ended, None while it runs."""


@dataclass
class Stream:
    """`penstock infer` on the hosts of a lab, seen by the rows that it writes.

    `join` starts a process on a host that has none, which asks to be taken in.

    Example:
        with streaming(hosts, arguments, rows, log) as stream:
            fault = stream.break_(random.Random(0))
    """

    lab: Lab
    rows: Path
    join: Callable[[str], Started]
    run: Started = field(init=False)
    arrivals: list[float] = field(default_factory=list)  # when each row was seen
    joining: dict[str, Started] = field(default_factory=dict)
    errors: IO[str] | None = None
    members: set[str] = field(default_factory=set)  # hosts that take part, as the first one says
    num_together: int = 0  # processes of a training, as the first one says

    @property
    def hosts(self) -> list[str]:
        """Every host but the first, which cannot be lost."""
        return [host.name for host in self.lab.spec.hosts[1:]]

    def look(self) -> int:
        """Count the rows that are there, and take note of when they came."""
        now_s = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            count = max(0, self.rows.read_bytes().count(b"\n") - 1)
            self.arrivals += [now_s] * (count - len(self.arrivals))
        return len(self.arrivals)

    @property
    def ended(self) -> bool:
        """Whether the first host's process has ended."""
        return self.run.exit_codes[self.lab.spec.hosts[0].name] is not None

    def wait_for_rows(self, count: int, timeout_s: float) -> bool:
        """Wait until some more rows are there; tells whether they came."""
        wanted, deadline = self.look() + count, time.monotonic() + timeout_s
        while self.look() < wanted and not self.ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def break_(self, draw: random.Random, kinds: Sequence[str] = KINDS) -> Fault:
        """Do something to one host or two, at once or shortly after each other; returns once results come again."""
        there = [host for host in self.hosts if host in self.members and self._processes(host)]
        num = min(len(there), 2 if draw.random() < 0.2 else 1)
        chosen = draw.sample(there, num)
        kind = draw.choice(list(kinds))
        apart_s = draw.choice([0.0, draw.uniform(0.5, 4.0)]) if num == 2 else 0.0
        phase = "one" if num == 1 else "two at once" if not apart_s else "two, one while the other is recovered from"
        fault = Fault(kind, tuple(chosen), self.look(), phase)
        began_s = time.monotonic()
        for index, host in enumerate(chosen):
            if index:
                self._watch_for(apart_s)
            self._do(kind, host)
        self._settle(fault, began_s)
        for host in chosen:
            self._undo(kind, host)
        return fault

    def _watch_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            time.sleep(_LOOK_S)

    def _settle(self, fault: Fault, began_s: float) -> None:
        """Wait until results come without a pause again; the longest pause from the fault on is its gap."""
        deadline = began_s + 3 * _WATCHED_S
        while not self.ended:
            self.look()
            now_s = time.monotonic()
            last_s = max(self.arrivals[-1], began_s) if self.arrivals else began_s
            resumed = [at_s for at_s in self.arrivals if at_s > began_s + 0.5]
            pauses = self._pauses(began_s)
            steady = now_s - began_s > _QUIET_S + max(pauses, default=0.0) and now_s - last_s < 1.0
            if resumed and steady and now_s - began_s > _WATCHED_AT_LEAST_S[fault.kind]:
                break
            if now_s > deadline or now_s - last_s > 2 * _WATCHED_S:
                fault.hung = True
                break
            time.sleep(_LOOK_S)
        fault.gap_s = max(self._pauses(began_s), default=0.0)

    def _pauses(self, since_s: float) -> list[float]:
        before = [at_s for at_s in self.arrivals if at_s <= since_s][-1:]
        later = [*before, *(at_s for at_s in self.arrivals if at_s > since_s)]
        return [second - max(first, since_s) for first, second in pairwise(later)]

    def _do(self, kind: str, host: str) -> None:
        if kind == "kill":
            self._signal(host, signal.SIGKILL)
        elif kind == "cut":
            self.lab.cut(host)
        elif kind == "freeze":
            self._signal(host, signal.SIGSTOP)
        elif kind == "slow":
            self.lab.slow(host, cpu=self.lab.spec.host(host).cpu / _SLOWED)
        elif kind == "memory":
            for pid in self._processes(host):
                Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
            files = [str(path / "cgroup.procs") for path in self._directories(host)]
            num_bytes = int(self.lab.spec.host(host).memory_bytes * _HOG_PART)
            join = 'for f in "$@"; do echo $$ > "$f"; done; exec "$PYTHON" -c "$HOG" "$BYTES"'
            env = {**os.environ, "HOG": _HOG, "PYTHON": sys.executable, "BYTES": str(num_bytes)}
            subprocess.run(["/bin/sh", "-c", join, "sh", *files], env=env, timeout=60, check=False)

    def _undo(self, kind: str, host: str) -> None:
        if kind == "cut":
            self.lab.restore(host)
        elif kind == "freeze":
            self._signal(host, signal.SIGCONT)
        elif kind == "slow":
            self.lab.slow(host, cpu=self.lab.spec.host(host).cpu)
        self.rejoin()

    def rejoin(self) -> None:
        """Start a process on every host that has none, as a board that was switched on again does."""
        for host in self.hosts:
            coming = host in self.joining and self.joining[host].exit_codes[host] is None
            if not coming and not self._processes(host) and not self.ended:
                with contextlib.suppress(ClusterError):  # what took the memory is not quite gone: it comes next time
                    self.joining[host] = self.join(host)

    def kill(self, host: str) -> None:
        """Kill what runs on a host, as where it loses power."""
        self._signal(host, signal.SIGKILL)

    def end_joining(self) -> None:
        """End what was started on hosts that had lost their process."""
        for other in self.joining.values():
            other.__exit__(None, None, None)

    def alive(self) -> list[str]:
        """Return the hosts, but for the first, that have a process."""
        return [host for host in self.hosts if self._processes(host)]

    def show(self, line: OutputLine) -> None:
        """Keep what a host writes, and take note of who takes part."""
        if (count := _GOES_ON_WITH.search(line.text)) is not None:
            self.num_together = int(count.group(1))
        elif (found := _GOES_ON.search(line.text)) is not None:
            self.members = set(found.group(1).split(", "))
        if self.errors is not None:
            self.errors.write(f"{line.host} | {line.text}\n")
            self.errors.flush()

    def _signal(self, host: str, number: signal.Signals) -> None:
        for pid in self._processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _processes(self, host: str) -> set[int]:
        """Return what runs on a host but for the daemon by which it is reached."""
        found = self.lab._machine.cgroups.processes(self.lab.spec.name, host)
        return {pid for pid in found if not _name(pid).startswith("sshd")}

    def _directories(self, host: str) -> list[Path]:
        return self.lab._machine.cgroups.directories(self.lab.spec.name, host)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return "sshd"  # it is gone


@contextlib.contextmanager
def streaming(
    hosts: SshLab, arguments: Sequence[str], rows: Path, log: Path, on: Sequence[str] | None = None, *, key: bytes
) -> Iterator[Stream]:
    """Run a verb that writes rows on the hosts of a lab by ssh, until it or the block ends; an empty key is none."""
    lab, cluster = hosts.lab, read_cluster(hosts.cluster)
    if on is not None:
        cluster = msgspec.structs.replace(cluster, devices=tuple(d for d in cluster.devices if d.name in on))
    machines, commands = commands_by_ssh(cluster, arguments, _PORT)
    _, joining = commands_by_ssh(cluster, ["worker", "--join", f"10.77.0.1:{_PORT}"], _PORT)
    names = [machine.name for machine in machines]

    def join(host: str) -> Started:
        index = names.index(host)
        return RemoteRun([machines[index]], [joining[index]], key=key, output=stream.show, end_together=False)

    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("a"))
        stream = Stream(lab, rows, join, errors=errors, members=set(names))
        stack.callback(stream.end_joining)
        stream.run = stack.enter_context(
            RemoteRun(machines, commands, key=key, output=stream.show, end_together="first")
        )
        yield stream
