"""The network of a lab: namespaces of the hosts and of their switch, made by `ip` and `tc`."""

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Protocol

from penstock.cluster.lab.spec import LabSpec
from penstock.errors import RunError

_DEADLINE_S = 30.0


class Shell(Protocol):
    """A shell that runs one program to its end and returns its output."""

    def run(self, command: Sequence[str]) -> str:
        """Run a command; raises `RunError` if it fails."""
        ...


class SystemShell:
    """Runs programs of this machine, each with a deadline.

    >>> SystemShell().run(["echo", "hello"])
    'hello\\n'
    """

    def run(self, command: Sequence[str]) -> str:
        """Run a command; raises `RunError` if it fails, with what it wrote to standard error, or takes too long."""
        try:
            with _signals_wait():
                # inherits open files: a command that outlives its killed caller keeps holding the lock under which it
                # runs
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=_DEADLINE_S,
                    stdin=subprocess.DEVNULL,
                    close_fds=False,
                )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"a lab command must end within {_DEADLINE_S:g} s, but {' '.join(command)} did not; "
                "run penstock lab down and try again"
            ) from None
        except OSError as error:
            raise RunError(f"{command[0]} could not be started ({error.strerror}); install it") from None
        if done.returncode != 0:
            words = " ".join(done.stderr.split()) or f"status {done.returncode}"
            raise RunError(
                f"a lab command must succeed, but {' '.join(command)} failed: {words}; "
                "run penstock lab down and try again"
            )
        return done.stdout


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay termination signals until the end of the block; only the main thread receives signals.

    If a handler raises inside `subprocess`, the lock on the child may stay held, and waiting for the child never
    returns. The programs run here take milliseconds, so the delay is short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for waited in came:
            signal.raise_signal(waited)


class RecordingShell:
    """A shell that runs nothing: it records the commands, and returns the given answers.

    >>> shell = RecordingShell({"ip netns list": "a\\n"})
    >>> shell.run(["ip", "netns", "list"]), shell.commands
    ('a\\n', ['ip netns list'])
    """

    def __init__(self, answers: Mapping[str, str | Exception] | None = None) -> None:
        self.commands: list[str] = []
        self.answers = dict(answers or {})

    def run(self, command: Sequence[str]) -> str:
        """Record the command and return its answer, or raise it if it is an exception."""
        line = " ".join(command)
        self.commands.append(line)
        answer = self.answers.get(line, "")
        if isinstance(answer, Exception):
            raise answer
        return answer


Command = list[str]

# Burst of a token bucket, in seconds: longer than a timer may be late, shorter than a large message takes.
_BURST_S = 0.005
_LATE_S = 0.0005
# two frames and their headers: with less, a slow link would wait after every frame
_MIN_BURST_BYTES = 4096
# The kernel passes up to 64 KB down in one piece; a bucket also counts the headers of all frames of the piece.
_LARGEST_PIECE_BYTES = 65536
_MAX_BURST_BYTES = 80_000
_QUEUE = "50ms"
_NETWORK = "10.77.0.0/24"


def switch_namespace(lab: str) -> str:
    """Return the name of the namespace of a lab's bridge."""
    return f"penstock.{lab}"


def host_namespace(lab: str, host: str) -> str:
    """Return the name of a host's namespace.

    >>> host_namespace("lab", "host0")
    'penstock.lab.host0'
    """
    return f"{switch_namespace(lab)}.{host}"


def host_address(index: int) -> str:
    """Return the address of a lab's host by its place in the lab file.

    >>> host_address(0)
    '10.77.0.1'
    """
    return f"10.77.0.{index + 1}"


def hosts_file(spec: LabSpec) -> str:
    """Return the text of `/etc/hosts` inside a lab, so that every host finds the others by name."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{host_address(index)} {host.name}" for index, host in enumerate(spec.hosts)]
    return "\n".join(lines) + "\n"


def up_commands(spec: LabSpec) -> list[Command]:
    """List the commands that build a lab's network."""
    switch = switch_namespace(spec.name)
    commands = [
        ["ip", "netns", "add", switch],
        ["ip", "-n", switch, "link", "add", "bridge", "type", "bridge"],
        ["ip", "-n", switch, "link", "set", "bridge", "up"],
    ]
    for index, host in enumerate(spec.hosts):
        namespace, port = host_namespace(spec.name, host.name), f"port{index}"
        commands += [
            ["ip", "netns", "add", namespace],
            ["ip", "-n", namespace, "link", "set", "lo", "up"],
            f"ip -n {switch} link add {port} type veth peer name eth0 netns {namespace}".split(),
            ["ip", "-n", switch, "link", "set", port, "master", "bridge", "up"],
            ["ip", "-n", namespace, "address", "add", f"{host_address(index)}/24", "dev", "eth0"],
            ["ip", "-n", namespace, "link", "set", "eth0", "up"],
            # cubic, as on boards; this machine's own algorithm may pace connections with a timer for every few frames
            f"ip -n {namespace} route replace {_NETWORK} dev eth0 src {host_address(index)} congctl cubic".split(),
        ]
        if host.bandwidth_bytes_per_s is not None:
            commands += bandwidth_commands(spec, index, host.bandwidth_bytes_per_s)
    return commands


def bandwidth_commands(spec: LabSpec, index: int, bytes_per_s: float) -> list[Command]:
    """Return the commands that set the bandwidth of a host's link in both directions."""
    switch, namespace = switch_namespace(spec.name), host_namespace(spec.name, spec.hosts[index].name)
    bucket = token_bucket(bytes_per_s)
    devices = [(switch, f"port{index}"), (namespace, "eth0")]
    commands = []
    for where, device in devices:
        replace = ["tc", "-n", where, "qdisc", "replace", "dev", device, "root"]
        # replace the bucket: if it were shrunk, a larger piece that waits in it would never be sent
        commands += [[*replace, "pfifo"], [*replace, *bucket]]
    return [
        *commands,
        ["ip", "-n", namespace, "link", "set", "eth0", "gso_max_size", str(piece_bytes(bytes_per_s))],
        # a connection reads the piece size only when it looks up its route
        ["ip", "-n", namespace, "route", "flush", "cache"],
    ]


def present_bandwidth(spec: LabSpec, host: str, shell: Shell) -> float | None:
    """Read the current bandwidth of a host's link, in bytes per second; None if unlimited."""
    text = shell.run(["tc", "-n", host_namespace(spec.name, host), "-j", "qdisc", "show", "dev", "eth0"])
    found = [each for each in json.loads(text or "[]") if each.get("kind") == "tbf"]
    return float(found[0]["options"]["rate"]) if found else None


def token_bucket(bytes_per_s: float) -> list[str]:
    """Describe a link of this bandwidth to `tc`.

    >>> " ".join(token_bucket(125_000_000))
    'tbf rate 1000000000bit burst 80000 latency 50ms'
    """
    rate = f"{round(bytes_per_s * 8)}bit"
    return ["tbf", "rate", rate, "burst", str(_burst_bytes(bytes_per_s)), "latency", _QUEUE]


def piece_bytes(bytes_per_s: float) -> int:
    """Return the bytes that a host passes to its link in one piece, as to a network card that splits it into frames.

    A bucket that cannot take a whole piece splits it. Each frame then costs a timer, a pass through the switch and a
    wake-up, on the cores that the hosts compute on; with real cards and switches it would not.

    >>> piece_bytes(1_250_000)
    5625
    """
    return min(_LARGEST_PIECE_BYTES, _burst_bytes(bytes_per_s) * 9 // 10)


def _burst_bytes(bytes_per_s: float) -> int:
    # a fast link needs at least the bytes that it carries while a timer is late
    most = max(_MAX_BURST_BYTES, round(bytes_per_s * _LATE_S))
    return min(most, max(_MIN_BURST_BYTES, round(bytes_per_s * _BURST_S)))


def cut_command(spec: LabSpec, host: str) -> Command:
    """Disconnect a host: its port leaves the bridge, so packets are dropped silently."""
    return ["ip", "-n", switch_namespace(spec.name), "link", "set", _port(spec, host), "nomaster"]


def restore_command(spec: LabSpec, host: str) -> Command:
    """Reconnect a host."""
    return ["ip", "-n", switch_namespace(spec.name), "link", "set", _port(spec, host), "master", "bridge"]


def cut_hosts(spec: LabSpec, shell: Shell) -> set[str]:
    """Return the hosts that are disconnected."""
    links = json.loads(shell.run(["ip", "-j", "-n", switch_namespace(spec.name), "link", "show"]) or "[]")
    plugged = {link["ifname"] for link in links if link.get("master") == "bridge"}
    return {host.name for host in spec.hosts if _port(spec, host.name) not in plugged}


def lab_namespaces(lab: str, shell: Shell) -> list[str]:
    """List the existing namespaces of a lab, which may be only partly built."""
    switch = switch_namespace(lab)
    names = [line.split()[0] for line in shell.run(["ip", "netns", "list"]).splitlines() if line.strip()]
    return sorted(name for name in names if name == switch or name.startswith(f"{switch}."))


def delete_command(namespace: str) -> Command:
    """Delete a namespace, and with it every link that ends in it."""
    return ["ip", "netns", "delete", namespace]


def _port(spec: LabSpec, host: str) -> str:
    return f"port{spec.hosts.index(spec.host(host))}"
