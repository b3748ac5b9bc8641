"""Commands on machines, by the system's `ssh`, which uses the account's keys, agent, users, ports and jump hosts.

A command on all machines of a cluster has its output, exit and cleanup:

    here:  ssh board0 python3 keeper.py ...   standard input stays open during the run
    there: the keeper starts the command in a new session, and ends that session when its input ends

So the command ends on request, if this process exits or is killed, and if the connection breaks.
"""

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Literal, TypeVar

from penstock.cluster.output import EndTogether, Output, OutputLine, exit_name, print_line
from penstock.errors import ClusterError, RunError
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
        name=device.name,
        target=device.ssh or device.address or device.name,
        folder=device.folder or FOLDER,
        venv=device.venv,
        python=device.python or "python3",
    )


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


PORT = 29500
GRACE_S = 5.0
_POLL_S = 0.05
# the keeper's path below a machine's folder, as copied by `push`
_KEEPER = "src/penstock/cluster/ssh/keeper.py"


@dataclass(slots=True)
class _RemoteProcess:
    host: Host
    process: "subprocess.Popen[str]"
    pumps: Sequence[threading.Thread]
    ends_s: float | None = None


def environment(
    hosts: Sequence[Host], addresses: Sequence[str], threads: Sequence[int], port: int
) -> list[dict[str, str]]:
    """Return the variables with which each machine's process finds the others, as torchrun would set them."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": addresses[0],
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PENSTOCK_HOST": host.name,
            "PENSTOCK_CPU": str(threads[rank]),
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        for rank, host in enumerate(hosts)
    ]


def remote_command(host: Host, env: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Return the command that runs Penstock in a machine's folder, under a keeper."""
    variables = [f"{name}={value}" for name, value in env.items()]
    keeper = [host.python, "-I", f"{host.folder}/{_KEEPER}", f"{GRACE_S:g}", host.folder, host.interpreter]
    return [*keeper, *variables, "--", *arguments]


class RemoteRun:
    """A command that runs on several machines, which receive the run's key; leaving the `with` block ends it.

    with RemoteRun(hosts, commands) as run:
        statuses = run.wait()
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        commands: Sequence[Sequence[str]],
        *,
        key: bytes = b"",
        output: Output = print_line,
        end_together: EndTogether = True,
    ) -> None:
        self._output, self._end_together = output, end_together
        self._members: list[_RemoteProcess] = []
        self._failure: BaseException | None = None
        try:
            for host, words in zip(hosts, commands, strict=True):
                self._members.append(self._start(host, words))
                with contextlib.suppress(OSError):  # `wait` returns the status of an unreachable machine
                    stdin = self._members[-1].process.stdin
                    if stdin is not None:
                        stdin.write(key.decode() + "\n")
                        stdin.flush()
        except BaseException:
            self.end()
            raise

    def wait(self, timeout_s: float | None = None) -> dict[str, int]:
        """Wait until every process has exited; return each machine's exit status.

        All processes are ended when one fails, or with `end_together="first"` when the first machine's process exits.
        The status of a machine that cannot be reached is 255, ssh's own. Raises `RunError` on a timeout.
        """
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        while None in (codes := [member.process.poll() for member in self._members]):
            over = codes[0] is not None if self._end_together == "first" else any(codes)
            over = bool(codes[0]) if self._end_together == "first-failed" else over
            if over and self._end_together:
                self.end()
            if self._failure is not None:
                raise self._failure
            if deadline is not None and time.monotonic() > deadline:
                raise RunError(f"the run did not end within {timeout_s:g} s and continues; wait longer or end it")
            time.sleep(_POLL_S)
        self._join()
        return {member.host.name: member.process.returncode for member in self._members}

    @property
    def exit_codes(self) -> dict[str, int | None]:
        """Exit status of each machine's process, None while it runs."""
        return {member.host.name: member.process.poll() for member in self._members}

    @property
    def first_failure(self) -> str | None:
        """The first machine with a failed process, as in `board1 ended with status 3`, or None."""
        for member in self._members:
            if code := member.process.returncode:
                name = "a broken connection" if code == _SSH_FAILED else exit_name(code if code < 128 else 128 - code)
                return f"{member.host.name} ended with {name}"
        return None

    def end(self) -> None:
        """End all processes, first with a grace period, and return when none is left; no error if all have ended."""
        for member in self._members:
            with contextlib.suppress(OSError):
                if member.process.stdin is not None:
                    member.process.stdin.close()
        deadline = time.monotonic() + GRACE_S + 2.0
        for member in self._members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.0, deadline - time.monotonic()))
            if member.process.poll() is None:  # the machine does not respond; its processes end with the connection
                member.process.send_signal(signal.SIGKILL)
                member.process.wait()

    def __enter__(self) -> "RemoteRun":
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()
        self._join()

    def _start(self, host: Host, words: Sequence[str]) -> _RemoteProcess:
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                host.command(*words),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"ssh could not be started ({error}); install openssh-client") from None
        streams: list[tuple[Literal["stdout", "stderr"], IO[str] | None]] = [
            ("stdout", process.stdout),
            ("stderr", process.stderr),
        ]
        pumps = [threading.Thread(target=self._pump, args=(host, name, each), daemon=True) for name, each in streams]
        for pump in pumps:
            pump.start()
        return _RemoteProcess(host, process, pumps)

    def _pump(self, host: Host, stream: Literal["stdout", "stderr"], pipe: IO[str]) -> None:
        try:
            for text in pipe:
                self._output(OutputLine(host=host.name, local_rank=0, stream=stream, text=text.rstrip("\n")))
        except BaseException as error:  # no thread reads further output: end the run; wait() raises the error
            self._failure = error

    def _join(self) -> None:
        for member in self._members:
            for pump in member.pumps:
                pump.join(GRACE_S)
