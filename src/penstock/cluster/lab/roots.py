"""Hosts of a lab with another processor: their programs are in a root file system and run by qemu-user.

`scripts/aarch64.sh build` makes the folder of such a root. A command on the host runs in it, and shares with this
machine

    /dev, /proc, /sys, /tmp      needed by most programs
    the current folder           under the same path, for models, scripts and results
    the source of penstock       in place of an installed penstock, in the root's own Python
    /etc/hosts of the host       so that hosts know each other by name

PYTHONPATH is not passed on, because its packages are for this machine's processor.

The mounts belong to the command's own mount namespace, made by `ip netns exec`, and end with it.
"""

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cluster.lab.shell import Shell
from penstock.errors import ClusterError, RunError

_PACKAGE = Path(__file__).resolve().parents[2]
# path of the virtual environment made by scripts/aarch64.sh
_ENVIRONMENT = "/opt/penstock"
_ENTER = """
root=$1 folder=$2 package=$3 environment=$4; shift 4
for place in /dev /proc /sys /tmp "$folder"; do
    mkdir -p "$root$place" && mount --rbind "$place" "$root$place" || exit 125
done
for site in "$root$environment"/lib/python3*/site-packages; do
    mkdir -p "$site/penstock" && mount --bind "$package" "$site/penstock" || exit 125
done
touch "$root/etc/hosts" && mount --bind /etc/hosts "$root/etc/hosts" || exit 125
exec chroot "$root" env -u PYTHONDONTWRITEBYTECODE -u PYTHONPATH -C "$folder" PATH="$environment/bin:/usr/bin:/bin" "$@"
"""


def root_folder(arch: str | None) -> Path | None:
    """Return the folder with the system for a processor; None for this machine's own processor.

    Folders are in `PENSTOCK_ROOTS`, by default `~/.cache/penstock/roots`, and named after the processor.

    >>> root_folder(None) is None
    True
    """
    if arch in {None, platform.machine()}:
        return None
    folder = os.environ.get("PENSTOCK_ROOTS") or Path.home() / ".cache/penstock/roots"
    return Path(folder, str(arch))


def check_root(host: str, arch: str | None, shell: Shell) -> None:
    """Raise `ClusterError` unless programs for a host's processor run here."""
    root = root_folder(arch)
    if root is None:
        return
    if not (root / _ENVIRONMENT.lstrip("/") / "bin/python").exists():
        raise ClusterError(
            f'{host} has arch = "{arch}", whose system was not found in {root}; make it with scripts/{arch}.sh build'
        )
    try:
        shell.run(["chroot", str(root), "true"])
    except RunError as error:
        raise ClusterError(
            f"{host} has programs for {arch}, which do not run here ({error}); run scripts/{arch}.sh build, which "
            "registers the emulator"
        ) from None


def inside(root: Path | None, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in a root, with this machine's Python replaced by the root's."""
    if root is None:
        return list(command)
    own = [f"{_ENVIRONMENT}/bin/python" if word == sys.executable else word for word in command]
    return ["sh", "-c", _ENTER, "penstock-root", str(root), os.getcwd(), str(_PACKAGE), _ENVIRONMENT, *own]
