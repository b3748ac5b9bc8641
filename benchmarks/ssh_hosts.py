"""Labs whose hosts are reached by ssh: an sshd on each, with keys of its own."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.cluster.lab import Lab, LabSpec, OutputLine, lab_session
from penstock.cluster.ssh.remote import SSH
from penstock.errors import UsageError

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
SSHD = shutil.which("sshd", path=_PATH)
# `ip netns exec` hides the cgroups, of which a machine of its own would know: version 1 or 2, whichever there is
_SEES_QUOTA = (
    "{ mount -t cgroup2 none /sys/fs/cgroup && test -e /sys/fs/cgroup/cpu.max; } 2>/dev/null || "
    "{ mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/cpu && "
    "mount -t cgroup -o cpu none /sys/fs/cgroup/cpu; } 2>/dev/null; "
    'exec "$0" "$@"'
)
_COMES_S = 30.0  # in which a daemon answers


@dataclass
class SshLab:
    """A lab whose hosts are reached by ssh, and the cluster file that says how."""

    lab: Lab
    cluster: Path
    ssh: str
    lines: list[OutputLine] = field(default_factory=list)

    def folder(self, host: str) -> Path:
        """Return what a host has for its own."""
        return self.cluster.parent / host


@contextlib.contextmanager
def ssh_lab(spec: LabSpec, folder: Path) -> Iterator[SshLab]:
    """Put a lab up with an sshd on each host; commands run by ssh come from the first one.

    The hosts share this machine's files, so each has a folder of its own; their virtual environment has the packages of
    this process's own, without Penstock. Raises `UsageError` without an ssh server.
    """
    missing = [tool for tool in ("sshd", "ssh", "ssh-keygen") if shutil.which(tool, path=_PATH) is None]
    if missing:
        raise UsageError(
            f"a lab reached by ssh needs {', '.join(missing)}; install the packages openssh-server and openssh-client"
        )
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
    for name in ("host_key", "user_key"):
        subprocess.run([*keygen, str(folder / name)], check=True)
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nPidFile none\n"
        "PasswordAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n IdentityFile {folder}/user_key\n IdentitiesOnly yes\n StrictHostKeyChecking no\n"
        " UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next((venv / "lib").iterdir()) / "site-packages"
    (packages / "packages.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    lines = ['name = "boards"']
    for index, host in enumerate(spec.hosts):
        lines += ["[[devices]]", f'name = "{host.name}"', "speed = 1.0", f'memory = "{host.memory_bytes} B"']
        lines += [f'address = "10.77.0.{index + 1}"', f'folder = "{folder}/{host.name}"', f'venv = "{venv}"']
    (folder / "cluster.toml").write_text("\n".join(lines) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    with lab_session(spec) as lab:
        namespace = f"penstock.{spec.name}.{spec.hosts[0].name}"
        made = SshLab(lab, folder / "cluster.toml", f"ip netns exec {namespace} ssh -F {folder}/ssh_config")
        daemon = ["sh", "-c", _SEES_QUOTA, str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]
        with lab.start(daemon, output=made.lines.append, end_together=False):
            for index in range(len(spec.hosts)):
                _wait_for([*shlex.split(made.ssh), f"10.77.0.{index + 1}", "true"])
            before = os.environ.get(SSH)
            os.environ[SSH] = made.ssh
            try:
                yield made
            finally:
                if before is None:
                    del os.environ[SSH]
                else:
                    os.environ[SSH] = before


def _wait_for(command: Sequence[str]) -> None:
    """Run a command until it succeeds; raises `TimeoutError`."""
    deadline = time.monotonic() + _COMES_S
    while subprocess.run(command, capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{shlex.join(command)} has not succeeded for {_COMES_S:g} s")
        time.sleep(0.1)
