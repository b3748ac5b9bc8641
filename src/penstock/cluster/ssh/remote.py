"""One command on one machine, by the system's own `ssh`: a person's keys, agent, users, ports, jump hosts just work."""

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import ClusterError
from penstock.spec.cluster import Cluster, Device

# another program or further options, as GIT_SSH_COMMAND is for git
SSH = "PENSTOCK_SSH"
FOLDER = "penstock"
_CONNECT_S = 10
_SSH_FAILED = 255
# a question would wait for ever, and a machine that is gone is to be noticed
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as `ssh` calls it, and where things lie there.

    `folder` is relative to the home folder of the account unless it begins with a slash; people who share an account
    give each their own.

    >>> Host("board0", "pi@board0").interpreter
    'penstock/.venv/bin/python'
    """

    name: str
    target: str
    folder: str = FOLDER
    venv: str = ""
    python: str = "python3"

    @property
    def environment(self) -> str:
        """The virtual environment."""
        return self.venv or f"{self.folder}/.venv"

    @property
    def interpreter(self) -> str:
        """The Python of the virtual environment."""
        return f"{self.environment}/bin/python"

    def command(self, *words: str) -> list[str]:
        """Return the command here that runs a command there.

        >>> Host("board0", "pi@board0").command("echo", "a b")[-2:]
        ['pi@board0', "echo 'a b'"]
        """
        patience = ("-o", f"ConnectTimeout={_CONNECT_S}")
        return [*shlex.split(os.environ.get(SSH) or "ssh"), *_OPTIONS, *patience, self.target, shlex.join(words)]


@dataclass(frozen=True, slots=True)
class Done:
    """What a command on another machine gave."""

    status: int
    out: bytes
    err: str

    @property
    def unreached(self) -> str | None:
        """Why `ssh` did not get there; None where it did."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return (lines[-1] if lines else "ssh gave no reason") if self.status == _SSH_FAILED else None


def hosts_of(cluster: Cluster) -> list[Host]:
    """Return the machines of a cluster, the one that feeds first."""
    first = cluster.feeding
    ordered = [first, *(device for device in cluster.devices if device.name != first.name)]
    return [host_of(device) for device in ordered]


def host_of(device: Device) -> Host:
    """Return how a device is reached: by the name that `ssh` has for it, its address, or its own name."""
    return Host(
        name=device.name, target=device.ssh or device.address or device.name, folder=device.folder or FOLDER,
        venv=device.venv, python=device.python or "python3",
    )  # fmt: skip


def run_on(host: Host, words: Sequence[str], *, data: bytes = b"", timeout_s: float = 60.0) -> Done:
    """Run a command on a machine, with some bytes on its standard input; raises `ClusterError` where ssh is missing."""
    try:
        done = subprocess.run(host.command(*words), input=data, capture_output=True, timeout=timeout_s)
    except FileNotFoundError as error:
        raise ClusterError(
            f"machines are reached by ssh, but {error.filename} is not here; install openssh-client"
        ) from None
    except subprocess.TimeoutExpired:
        return Done(_SSH_FAILED, b"", f"no answer for {timeout_s:g} s")
    return Done(done.returncode, done.stdout, done.stderr.decode(errors="replace"))


def on_all(hosts: Sequence[Host], work: Callable[[Host], T]) -> dict[str, T]:
    """Do something on all machines at once; returns what came of it by their names."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return dict(zip((host.name for host in hosts), pool.map(work, hosts), strict=True))


def require(host: Host, done: Done, what: str) -> bytes:
    """Return what a command wrote; raises `ClusterError` that names the machine where it failed."""
    if done.unreached is not None:
        raise ClusterError(
            f"{host.name} cannot be reached: {done.unreached}; try ssh {host.target}, and see penstock hosts check"
        )
    if done.status:
        lines = [line for line in done.err.splitlines() if line.strip()]
        raise ClusterError(f"{what} failed on {host.name}: {lines[-1] if lines else f'status {done.status}'}")
    return done.out


def address_of(host: Host, device: Device) -> str:
    """Return where other machines reach this one: the address in the cluster file, or what `ssh` takes for it."""
    if device.address:
        return device.address
    command = [*shlex.split(os.environ.get(SSH) or "ssh"), "-G", host.target]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0)
    except (OSError, subprocess.TimeoutExpired):
        return host.target.rpartition("@")[2]
    names = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.target.rpartition("@")[2]
