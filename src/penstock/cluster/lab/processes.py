"""Start of processes inside a lab's hosts, with a guard so that none outlives its starter.

A process is started by a chain of `exec`, which keeps one process id:

    sh: join the host's cgroups ─▶ ip netns exec ─▶ unshare --uts ─▶ sh: take the host's name ─▶ COMMAND

So the command is under the host's limits from its first instruction, and sees the host's network, its own host name,
and the names of the other hosts.
"""

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from penstock.cluster.lab.network import Shell, host_namespace
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
_JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
_RENAME = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
# kills all processes in the given cgroups if the pipe closes without a message; a process that is being started may
# join late, so it continues until the cgroups have stayed empty for a while
_GUARD = """
read -r word && [ "$word" = done ] && exit
empty=0
while [ $empty -lt 20 ]; do
    pids=$(cat "$@" 2>/dev/null | grep -v '^0$')
    if [ -n "$pids" ]; then empty=0; kill -9 $pids 2>/dev/null; else empty=$((empty + 1)); fi
    sleep 0.05
done
"""
# Keeps the given cores busy until the pipe closes. A process of lowest priority may get no CPU time to exit on a busy
# machine, so its priority is raised first.
_AWAKE = """
spinners=
for core in "$@"; do
    chrt --idle 0 taskset --cpu-list "$core" sh -c 'while :; do :; done' "$0" & spinners="$spinners $!"
done
read -r word
for spinner in $spinners; do chrt --other --pid 0 "$spinner"; kill -9 "$spinner"; done
"""
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_WAY_OUT_S = 2.0  # signals within this time after the block have no effect


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A host to start processes on: its address, limits and cgroups."""

    lab: str
    host: str
    address: str
    cpu: float
    bandwidth_bytes_per_s: float | None
    memory_bytes: int
    directories: tuple[Path, ...]
    core: int | None = None
    root: Path | None = None

    @property
    def process_files(self) -> list[str]:
        """Files to which a process writes its id to join the host's cgroups."""
        return [str(path / "cgroup.procs") for path in self.directories]


def command_line(target: Target, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` inside a host."""
    return [
        *("sh", "-c", _JOIN, "penstock-lab", *target.process_files, "--"),
        *(() if target.core is None else ("taskset", "--cpu-list", str(target.core))),
        *("ip", "netns", "exec", host_namespace(target.lab, target.host)),
        *("unshare", "--uts", "sh", "-c", _RENAME, target.host, *inside(target.root, command)),
    ]


def choose_cores(shares: Sequence[float], cores: Sequence[int]) -> list[int | None]:
    """Assign a core of the machine to each host with at most one core, so that shares on a core add up to at most 1.

    A host with at most one core cannot run two threads simultaneously. Also, the kernel hands out a quota per core:
    when a thread sleeps on one of two cores, that core's part is lost. The result is None for a host that is larger or
    does not fit.

    >>> choose_cores([0.35, 0.35, 0.35, 0.35], [0, 1])
    [0, 1, 0, 1]
    """
    load = dict.fromkeys(cores, 0.0)
    chosen: list[int | None] = [None] * len(shares)
    for index in sorted(range(len(shares)), key=lambda i: -shares[i]):
        core = min(load, key=lambda c: load[c])
        if load[core] + shares[index] <= 1.0 + 1e-9:
            load[core] += shares[index]
            chosen[index] = core
    return chosen


def environment(
    targets: Sequence[Target], node_rank: int, local_rank: int, nproc_per_host: int, port: int
) -> dict[str, str]:
    """Return the variables that torchrun would set for a process, and the name of its host.

    Rank 0 is on the first of the participating hosts, whose address is MASTER_ADDR.
    """
    return {
        "RANK": str(node_rank * nproc_per_host + local_rank),
        "WORLD_SIZE": str(len(targets) * nproc_per_host),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(nproc_per_host),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(len(targets)),
        "NODE_RANK": str(node_rank),
        "MASTER_ADDR": targets[0].address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PENSTOCK_HOST": targets[node_rank].host,
        # cgroups are not visible inside a namespace entered by `ip netns`
        "PENSTOCK_CPU": f"{targets[node_rank].cpu:g}",
        "PENSTOCK_BANDWIDTH": f"{targets[node_rank].bandwidth_bytes_per_s or 0:g}",
        "PENSTOCK_TRUSTED": "1",  # no other machine reaches a lab's hosts
        # otherwise output to a pipe is buffered in blocks
        "PYTHONUNBUFFERED": "1",
    }


def start_process(target: Target, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a command inside a host, in a new session, with its output in pipes."""
    return subprocess.Popen(
        command_line(target, command),
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def signal_group(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Send a signal to a started process and everything in its session."""
    # until the process has been waited for, its id cannot belong to another process
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _start_helper(command: Sequence[str], *, stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=stdin, stdout=nowhere, stderr=nowhere, start_new_session=True)


class Guard:
    """A helper that kills the processes of some hosts if this process is killed without cleaning up."""

    def __init__(self, targets: Sequence[Target]) -> None:
        files = [file for target in targets for file in target.process_files]
        self._process = _start_helper(["sh", "-c", _GUARD, "penstock-lab-guard", *files], stdin=subprocess.PIPE)

    def release(self) -> None:
        """Release the guard after all guarded processes have exited."""
        self._process.communicate(b"done\n", timeout=10)


class Awake:
    """A load of lowest priority that keeps cores from sleeping.

    A hypervisor gives the sleeping cores of a virtual machine to others, so they wake late, with cold caches. Then a
    host is slower the more it waits, especially with busy neighbours; a board has its core to itself.
    """

    def __init__(self, cores: Iterable[int], lab: str = "") -> None:
        # the lab's name identifies this process in a process list
        command = ["sh", "-c", _AWAKE, f"penstock-lab-awake {lab}", *map(str, sorted(set(cores)))]
        self._process = _start_helper(command, stdin=subprocess.PIPE)

    def release(self) -> None:
        """Allow the cores to sleep again."""
        self._process.communicate()


@contextlib.contextmanager
def ended_by_signals(*, way_out_s: float = _WAY_OUT_S) -> Iterator[None]:
    """Convert a termination signal to `SystemExit` with the usual exit status for that signal, such as 143.

    A second signal neither interrupts the cleanup nor changes the exit status; a closing terminal sends several.
    Signals that the program handles itself, or ignores as with `nohup`, are unchanged. Only the main thread receives
    signals.

    Example:
        with ended_by_signals():
            lab.up()
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = False

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        if not ending:
            ending = True
            raise SystemExit(128 + number)

    taken = [number for number in _ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, end)
        yield
    finally:
        late = _end_later(time.monotonic() + way_out_s)
        for number in taken:
            signal.signal(number, late if ending else signal.SIG_DFL)


def _end_later(begin_s: float) -> Callable[[int, FrameType | None], None]:
    """Return a handler that ignores signals until `begin_s`, when the program should have exited, and ends it after."""

    def end(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() > begin_s:
            raise SystemExit(128 + number)

    return end


def ignore_late_signals(end: SystemExit) -> None:
    """Ignore further signals in a program that a signal has ended, so that its exit status does not change."""
    if end.code in {128 + number for number in _ENDINGS}:
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)
