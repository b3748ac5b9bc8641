"""A command on a machine, by the system's `ssh`, which uses the account's keys, agent, users, ports and jump hosts."""

import os
import secrets
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import ClusterError
from penstock.spec.cluster import Cluster, Device

# another program or additional options, as in git's GIT_SSH_COMMAND
SSH = "PENSTOCK_SSH"
FOLDER = "penstock"
_CONNECT_S = 10
_SSH_FAILED = 255
# no prompts, which would block forever; keep-alives, to detect a lost machine
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_MARKED = 'printf %s "$0"; "$@"; code=$?; printf %s "$0"; exit $code'

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with its `ssh` target and paths.

    `folder` is relative to the account's home folder unless it begins with a slash; users who share an account need
    separate folders.

    >>> Host("board0", "pi@board0").interpreter
    'penstock/.venv/bin/python'
    """

    name: str
    target: str
    folder: str = FOLDER
    venv: str = ""
    python: str = "python3"
    connect_s: int = _CONNECT_S

    @property
    def environment(self) -> str:
        """Path of the virtual environment."""
        return self.venv or f"{self.folder}/.venv"

    @property
    def interpreter(self) -> str:
        """Path of the virtual environment's Python."""
        return f"{self.environment}/bin/python"

    def command(self, *words: str) -> list[str]:
        """Return the local command that runs a command on the machine.

        >>> Host("board0", "pi@board0").command("echo", "a b")[-2:]
        ['pi@board0', "echo 'a b'"]
        """
        patience = ("-o", f"ConnectTimeout={self.connect_s}")
        return [*shlex.split(os.environ.get(SSH) or "ssh"), *_OPTIONS, *patience, self.target, shlex.join(words)]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command on another machine."""

    status: int
    out: bytes
    err: str

    @property
    def unreached(self) -> str | None:
        """Reason why `ssh` failed to connect, or None."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return (lines[-1] if lines else "ssh gave no reason") if self.status == _SSH_FAILED else None


def hosts_of(cluster: Cluster) -> list[Host]:
    """Return the machines of a cluster, the driver first."""
    first = cluster.feeding
    ordered = [first, *(device for device in cluster.devices if device.name != first.name)]
    return [host_of(device) for device in ordered]


def host_of(device: Device) -> Host:
    """Return the host of a device; its target is the device's `ssh` name, else its address, else its name."""
    return Host(
        name=device.name, target=device.ssh or device.address or device.name, folder=device.folder or FOLDER,
        venv=device.venv, python=device.python or "python3",
    )  # fmt: skip


def run_on(host: Host, words: Sequence[str], *, data: bytes = b"", timeout_s: float = 60.0) -> CommandResult:
    """Run a command on a machine, with `data` on its standard input; raises `ClusterError` if ssh is not installed.

    Marks before and after the output keep apart from it what the machine's shell prints at login.
    """
    mark = secrets.token_hex(8)
    try:
        done = subprocess.run(
            host.command("sh", "-c", _MARKED, mark, *words), input=data, capture_output=True, timeout=timeout_s
        )
    except FileNotFoundError as error:
        raise ClusterError(f"machines are reached by ssh; {error.filename} not found; install openssh-client") from None
    except subprocess.TimeoutExpired:
        return CommandResult(_SSH_FAILED, b"", f"no answer for {timeout_s:g} s")
    _, *found = done.stdout.split(mark.encode())
    if len(found) != 2 and not done.returncode:
        said = (done.stdout.decode(errors="replace").split("\n") or [""])[0][:80]
        return CommandResult(
            _SSH_FAILED, b"", f"its shell ran another command, or ended at login, after printing {said!r}"
        )
    return CommandResult(done.returncode, found[0] if found else b"", done.stderr.decode(errors="replace"))


def on_all(hosts: Sequence[Host], work: Callable[[Host], T]) -> dict[str, T]:
    """Call a function for all machines in parallel; return the results by name."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return dict(zip((host.name for host in hosts), pool.map(work, hosts), strict=True))


def require(host: Host, done: CommandResult, what: str) -> bytes:
    """Return the output of a command; raises `ClusterError` with the machine's name if it failed."""
    if done.unreached is not None:
        raise ClusterError(
            f"{host.name} cannot be reached: {done.unreached}; try ssh {host.target}, and see penstock hosts check"
        )
    if done.status:
        lines = [line for line in done.err.splitlines() if line.strip()]
        raise ClusterError(f"{what} failed on {host.name}: {lines[-1] if lines else f'status {done.status}'}")
    return done.out


def address_of(host: Host, device: Device) -> str:
    """Return the address of a machine for the other machines: from the cluster file, else `ssh`'s host name."""
    if device.address:
        return device.address
    command = [*shlex.split(os.environ.get(SSH) or "ssh"), "-G", host.target]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0)
    except (OSError, subprocess.TimeoutExpired):
        return host.target.rpartition("@")[2]
    names = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.target.rpartition("@")[2]
