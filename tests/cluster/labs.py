"""Labs for tests, and what of them is left on the machine."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cluster.lab import HostSpec, Lab, LabSpec, OutputLine

MIB = 2**20
PROGRAMS = ("ip", "tc", "unshare")
LAB_MARKS = [
    pytest.mark.root,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="labs need root"),
    pytest.mark.skipif(any(shutil.which(program) is None for program in PROGRAMS), reason="labs need ip and tc"),
]


def needs_lab(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that starts a lab: it needs root, and the programs of labs."""
    for mark in LAB_MARKS:
        test = mark(test)
    return test


def traces(name: str) -> dict[str, list[str]]:
    """Everything that labs whose names begin so could leave on this machine; other tests have labs at the same time."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    cgroups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if "/penstock." in path]
    processes = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "penstock-lab" in command:
            processes.append(command)
    found = {
        "namespaces": [line.split()[0] for line in namespaces.splitlines()],
        "cgroups": cgroups,
        "host files": map(str, Path("/etc/netns").glob("*")),
        "state": map(str, Path("/run/penstock").glob("*.json*")),
        "processes": processes,
    }
    own = {kind: sorted(thing for thing in things if name in thing) for kind, things in found.items()}
    # outside of all namespaces no lab has a link
    return own | {"links": sorted(line.split(": ")[1] for line in links.splitlines())}


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait for something, and fail when it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.002)


def make_spec(
    name: str, num_hosts: int = 2, *, memory_bytes: int = 256 * MIB, rate: float | None = 12_500_000.0
) -> LabSpec:
    """Equal hosts of 0.35 core."""
    hosts = tuple(
        HostSpec(name=f"host{index}", cpu=0.35, memory_bytes=memory_bytes, bandwidth_bytes_per_s=rate)
        for index in range(num_hosts)
    )
    return LabSpec(name=name, hosts=hosts)


class Collected:
    """An output callback that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[OutputLine] = []

    def __call__(self, line: OutputLine) -> None:
        self.lines.append(line)

    def of(self, host: str, stream: str = "stdout") -> list[str]:
        """The lines of one host."""
        return [line.text for line in self.lines if line.host == host and line.stream == stream]


def output_of(lab: Lab, command: list[str], on: list[str] | None = None) -> Collected:
    """Run a command to its end in a lab."""
    collected = Collected()
    with lab.start(command, on=on, output=collected) as run:
        codes = run.wait(timeout_s=30)
    assert not any(codes.values()), collected.lines
    return collected
